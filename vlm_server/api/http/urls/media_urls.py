"""The pool of processes that read the `https:` and `file:` URLs of requests."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vlm_server.api.fair_turns import FairPool
from vlm_server.api.parsing.media.external import Contents, MediaUrl, UrlJob
from vlm_server.platform.child.pool import ChildFailed, ChildTimeout
from vlm_server.settings import MIB, Limits, Urls

NUM_READERS = 4
"""The most requests with URLs being read; other requests wait."""
_CHILD = "vlm_server.api.http.urls.media_url_child"
_GRACE_SECONDS = 5.0
"""Time for a process to start, and between its own timeout and the kill."""
_CODE_BYTES = 1024 * MIB


class MediaUrls:
    """Reads URLs that the settings allow, within their limits, in processes started on demand.

    Use from the event loop. `child` is for tests: its module and arguments.
    """

    def __init__(self, urls: Urls, limits: Limits, *child: str) -> None:
        self._urls = urls
        self._max_total_bytes = limits.max_body_bytes
        module, *arguments = child or (_CHILD,)
        self._pool = FairPool(
            module,
            NUM_READERS,
            *arguments,
            outcome=Contents,
            memory_bytes=_CODE_BYTES + 4 * limits.max_body_bytes,
        )

    async def read(self, urls: Sequence[MediaUrl], owner: str) -> dict[str, bytes]:
        """The bytes of each URL of `owner`. Raises RequestError. Cancelling kills the process."""
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
            contents = await self._pool.run(
                msgspec.msgpack.encode(job), owner, self._urls.timeout_seconds + _GRACE_SECONDS
            )
        except ChildTimeout:
            seconds = f"{self._urls.timeout_seconds:g} seconds"
            raise urls[0].refusal(f"did not arrive within {seconds}") from None
        except ChildFailed:
            raise urls[0].refusal("can't be read: what its URL leads to takes too much") from None
        return {url.url: data for url, data in zip(urls, contents.data, strict=True)}

    def _check_enabled(self, url: MediaUrl) -> None:
        if url.is_file and not self._urls.file_folders:
            raise url.refusal(
                "must be a base64 data URL; this server reads no `file:` URLs (urls.file_folders)"
            )
        if not url.is_file and not self._urls.https_hosts:
            raise url.refusal(
                "must be a base64 data URL; this server fetches no `https:` URLs (urls.https_hosts)"
            )
