"""Child processes for the front's work on hostile bytes, in which API keys take turns."""

from __future__ import annotations

import logging
from functools import partial
from typing import Generic, TypeVar

import anyio
import anyio.to_thread
from msgspec import Struct, msgpack

from vlm_server.api.fair_turns import FairTurns
from vlm_server.api.outcomes import SentError
from vlm_server.errors import EngineUnavailable
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.platform.child.pool import ChildNotStarted, ChildPool

T = TypeVar("T", bound=Struct)

logger = logging.getLogger(__name__)


class FairPool(Generic[T]):
    """At most `size` processes of `module`, which calls `serve_outcomes`; started on demand.

    An owner has at most `owner_limit` of them at a time. Use from one event loop.
    """

    def __init__(
        self,
        module: str,
        size: int,
        *arguments: object,
        outcome: type[T],
        memory_bytes: int,
        owner_limit: int | None = None,
    ) -> None:
        """arguments: of the process, after `memory_bytes`. outcome: of a job."""
        words = map(str, (memory_bytes, *arguments))
        self._pool = ChildPool(module, size, *words, memory_bytes=memory_bytes)
        self._turns = FairTurns(size, owner_limit)
        self._threads = anyio.CapacityLimiter(size)
        self._decoder: msgpack.Decoder[T | SentError] = msgpack.Decoder(outcome | SentError)

    async def run(self, job: bytes | bytearray, owner: str, seconds: float) -> T:
        """The outcome of `job`, in a turn of `owner`. Cancelling kills the process.

        Raises the job's RequestError, EngineUnavailable if the machine is short of processes,
        ChildTimeout and ChildFailed.
        """
        cancellation = Cancellation()
        run = partial(self._pool.run, job, seconds, cancellation)
        try:
            async with self._turns.turn(owner):
                answer = await anyio.to_thread.run_sync(
                    run, abandon_on_cancel=True, limiter=self._threads
                )
        except ChildNotStarted as error:
            logger.warning("a process for clients' data %s", error)
            raise EngineUnavailable("The server is short of processes; try again later.") from None
        finally:
            cancellation.cancel()
        outcome = self._decoder.decode(answer)
        if isinstance(outcome, SentError):
            raise outcome.received()
        return outcome

    def close(self) -> None:
        """End idle processes."""
        self._pool.close()
