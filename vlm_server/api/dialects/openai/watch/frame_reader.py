"""The pool of processes that read frames: nothing hostile is decoded in the front."""

from __future__ import annotations

from vlm_server.api.fair_pool import FairPool
from vlm_server.api.parsing.media.frame import FrameFacts
from vlm_server.errors import InvalidImage
from vlm_server.platform.child.pool import ChildFailed, ChildTimeout
from vlm_server.settings import Settings

_MODULE = "vlm_server.api.parsing.media.frame_process"


class FrameReader:
    """Reads frames in processes started on demand. Use from one event loop."""

    def __init__(self, settings: Settings) -> None:
        limits = settings.limits
        self._seconds = limits.parsing_timeout_seconds
        self._pool = FairPool(
            _MODULE,
            limits.max_parsing_processes,
            self._seconds,
            limits.max_image_pixels,
            outcome=FrameFacts,
            memory_bytes=settings.image.max_decode_memory_bytes,
        )

    async def read(self, data: bytes, owner: str) -> FrameFacts:
        """The facts of the frame of `owner` in `data`. Cancelling kills the process.

        Raises InvalidImage, or EngineUnavailable if the machine is short of processes.
        """
        try:
            return await self._pool.run(data, owner, self._seconds)
        except (ChildTimeout, ChildFailed):
            raise InvalidImage(
                "Decoding the frame takes too much time or memory.", "frame"
            ) from None

    def close(self) -> None:
        """End idle processes."""
        self._pool.close()
