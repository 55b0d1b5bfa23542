"""The pool of processes that read the `https:` and `file:` URLs of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import anyio
import anyio.to_thread
import msgspec

from vlm_server.api.parsing.media.external import Contents, MediaUrl, SentError, UrlJob
from vlm_server.errors import RequestError
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.platform.child.pool import ChildFailed, ChildPool, ChildTimeout
from vlm_server.settings import MIB, Limits, Urls

NUM_READERS = 4
"""The most requests with URLs being read; other requests wait."""
_CHILD = "vlm_server.api.http.urls.media_url_child"
_GRACE_SECONDS = 5.0
"""Time for a process to start, and between its own timeout and the kill."""
_CODE_BYTES = 1024 * MIB


_decode: Callable[[bytearray], Contents | SentError] = msgspec.msgpack.Decoder(
    Contents | SentError
).decode


class MediaUrls:
    """Reads URLs that the settings allow, within their limits, in processes started on demand.

    Use from the event loop. `child` is for tests: its module and arguments.
    """

    def __init__(self, urls: Urls, limits: Limits, *child: str) -> None:
        self._urls = urls
        self._max_total_bytes = limits.max_body_bytes
        self._turns = anyio.CapacityLimiter(NUM_READERS)
        memory_bytes = _CODE_BYTES + 4 * limits.max_body_bytes
        module, *arguments = child or (_CHILD,)
        self._pool = ChildPool(
            module, NUM_READERS, str(memory_bytes), *arguments, memory_bytes=memory_bytes
        )

    async def read(self, urls: Sequence[MediaUrl]) -> dict[str, bytes]:
        """The bytes of each URL. Raises RequestError. Cancelling kills the process."""
        for url in urls:
            self._check_enabled(url)
        job = UrlJob(
            urls=tuple(urls),
            hosts=self._urls.https_hosts,
            roots=self._urls.file_folders,
            seconds=self._urls.timeout_seconds,
            max_total_bytes=self._max_total_bytes,
        )
        try:
            outcome = _decode(await self._run(msgspec.msgpack.encode(job)))
        except ChildTimeout:
            seconds = f"{self._urls.timeout_seconds:g} seconds"
            raise urls[0].refusal(f"did not arrive within {seconds}") from None
        except ChildFailed:
            raise urls[0].refusal("can't be read: what its URL leads to takes too much") from None
        if isinstance(outcome, SentError):
            raise RequestError.from_code(outcome.code, outcome.message, outcome.param)
        return {url.url: data for url, data in zip(urls, outcome.data, strict=True)}

    def _check_enabled(self, url: MediaUrl) -> None:
        if url.is_file and not self._urls.file_folders:
            raise url.refusal(
                "must be a base64 data URL; this server reads no `file:` URLs (urls.file_folders)"
            )
        if not url.is_file and not self._urls.https_hosts:
            raise url.refusal(
                "must be a base64 data URL; this server fetches no `https:` URLs (urls.https_hosts)"
            )

    async def _run(self, job: bytes) -> bytearray:
        cancellation = Cancellation()
        seconds = self._urls.timeout_seconds + _GRACE_SECONDS
        run = partial(self._pool.run, job, seconds, cancellation)
        try:
            return await anyio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=self._turns)
        finally:
            cancellation.cancel()
