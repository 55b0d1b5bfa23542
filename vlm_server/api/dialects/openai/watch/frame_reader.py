"""The pool of processes that read frames: nothing hostile is decoded in the front."""

from __future__ import annotations

from functools import partial

import anyio.to_thread
import msgspec

from vlm_server.api.fair_turns import FairTurns
from vlm_server.api.parsing.media.external import SentError
from vlm_server.api.parsing.media.frame import FrameFacts
from vlm_server.errors import EngineUnavailable, InvalidImage, RequestError
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.platform.child.pool import ChildFailed, ChildNotStarted, ChildPool, ChildTimeout
from vlm_server.settings import Settings

_MODULE = "vlm_server.api.parsing.media.frame_process"
_decoder: msgspec.msgpack.Decoder[FrameFacts | SentError] = msgspec.msgpack.Decoder(
    FrameFacts | SentError
)


class FrameReader:
    """Reads frames in processes started on demand. Use from one event loop."""

    def __init__(self, settings: Settings) -> None:
        limits = settings.limits
        self._seconds = limits.parsing_timeout_seconds
        self._threads = anyio.CapacityLimiter(limits.max_parsing_processes)
        self._turns = FairTurns(limits.max_parsing_processes)
        memory_bytes = settings.image.max_decode_memory_bytes
        arguments = str(memory_bytes), str(self._seconds), str(limits.max_image_pixels)
        self._pool = ChildPool(
            _MODULE, limits.max_parsing_processes, *arguments, memory_bytes=memory_bytes
        )

    async def read(self, data: bytes | bytearray, owner: str) -> FrameFacts:
        """The facts of the frame of `owner` in `data`. Cancelling kills the process.

        Raises InvalidImage, or EngineUnavailable if the machine is short of processes.
        """
        cancellation = Cancellation()
        run = partial(self._pool.run, data, self._seconds, cancellation)
        try:
            async with self._turns.turn(owner):
                answer = await anyio.to_thread.run_sync(
                    run, abandon_on_cancel=True, limiter=self._threads
                )
        except ChildNotStarted:
            raise EngineUnavailable("The server is short of processes; try again later.") from None
        except (ChildTimeout, ChildFailed):
            raise InvalidImage(
                "Decoding the frame takes too much time or memory.", "frame"
            ) from None
        finally:
            cancellation.cancel()
        outcome = _decoder.decode(answer)
        if isinstance(outcome, SentError):
            raise RequestError.from_code(outcome.code, outcome.message, outcome.param)
        return outcome

    def close(self) -> None:
        """End idle processes."""
        self._pool.close()
