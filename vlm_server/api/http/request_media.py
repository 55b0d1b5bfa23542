"""The bytes of a request's media that are not in its body: of uploaded files, and of URLs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import anyio
import anyio.to_thread

from vlm_server.api.files.index import StoredFile
from vlm_server.api.files.store import FileStore
from vlm_server.api.http.urls.media_urls import MediaUrls
from vlm_server.api.parsing.media.external import MediaUrl, not_stored
from vlm_server.errors import PayloadTooLarge
from vlm_server.settings import Limits

_READER_THREADS = 4


class RequestMedia:
    """Reads the media of requests. Use from the event loop."""

    def __init__(self, files: FileStore, urls: MediaUrls, limits: Limits) -> None:
        self._files = files
        self._urls = urls
        self._max_total_bytes = limits.max_body_bytes
        self._threads = anyio.CapacityLimiter(_READER_THREADS)

    async def read(
        self, needed: Sequence[MediaUrl], owner: str, reserve: Callable[[int], None]
    ) -> dict[str, bytes]:
        """The bytes of what `needed` names, by URL or name; `owner` has uploaded the files.

        `reserve` is called with the bytes of the files, before they are read. Raises RequestError.
        """
        uploaded = [media for media in needed if media.is_uploaded]
        contents = {}
        if uploaded:
            run = partial(anyio.to_thread.run_sync, limiter=self._threads)
            files = await run(self._find, uploaded, owner)
            reserve(sum(file.num_bytes for file in files))
            contents = await run(self._read, uploaded, files)
        if urls := [media for media in needed if not media.is_uploaded]:
            contents |= await self._urls.read(urls, owner)
        return contents

    def _find(self, uploaded: Sequence[MediaUrl], owner: str) -> list[StoredFile]:
        files = []
        for media in uploaded:
            file = self._files.find(owner, media.url)
            if file is None:
                raise not_stored(media.param)
            if file.num_bytes > media.max_bytes:
                raise media.too_large()
            files.append(file)
        if sum(file.num_bytes for file in files) > self._max_total_bytes:
            raise PayloadTooLarge(
                f"The files of the request hold more than {self._max_total_bytes} bytes together "
                "(limits.max_body_bytes)."
            )
        return files

    def _read(self, uploaded: Sequence[MediaUrl], files: Sequence[StoredFile]) -> dict[str, bytes]:
        contents = {}
        for media, file in zip(uploaded, files, strict=True):
            data = self._files.read(file)
            if data is None:  # deleted meanwhile
                raise not_stored(media.param)
            contents[media.url] = data
        return contents
