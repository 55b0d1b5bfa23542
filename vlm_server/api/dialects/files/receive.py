"""Uploads: a request's body, or the file in its form, written to disk as it arrives."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request

from vlm_server.api.dialects.files.form import OVERHEAD_BYTES, UploadForm
from vlm_server.api.files.store import FileStore
from vlm_server.api.files.upload import Upload
from vlm_server.api.http import body
from vlm_server.api.http.access import keys
from vlm_server.api.http.body import ArrivingBodies, BodyBounds
from vlm_server.errors import QueueFull
from vlm_server.settings import FileSettings

T = TypeVar("T")
P = ParamSpec("P")
_THREADS = 4
MAX_UPLOADS = 32
"""The most uploads of one client at a time: each has a file open."""
_ARRIVING_FRACTION = 4


class Uploads:
    """Receives uploads into `store`, on threads of its own: disks may be slow.

    Uploads that are still arriving may have a quarter of the store's bytes in all.
    """

    def __init__(self, store: FileStore, settings: FileSettings) -> None:
        self._store = store
        self._bounds = BodyBounds(
            store.max_file_bytes + OVERHEAD_BYTES,
            settings.upload_timeout_seconds,
            "files.max_file_bytes",
            "files.upload_timeout_seconds",
            "files.max_bytes",
        )
        limit_bytes = max(self._bounds.max_bytes, settings.max_bytes // _ARRIVING_FRACTION)
        self._arriving = ArrivingBodies(limit_bytes)
        self._num_uploads = Counter[str]()
        """Arriving uploads by owner."""
        self._threads = anyio.CapacityLimiter(_THREADS)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function`, which uses the disk, on a thread."""
        call = partial(function, *args, **kwargs)
        return await anyio.to_thread.run_sync(call, limiter=self._threads)

    @asynccontextmanager
    async def form(self, request: Request) -> AsyncIterator[tuple[UploadForm, Upload]]:
        """The complete form in the body of `request`, and its file. Raises RequestError."""
        async with self._upload(request) as upload:
            form = UploadForm(request.headers.get("content-type", ""), upload)
            await self._receive(request, form.write)
            form.finish()
            yield form, upload

    @asynccontextmanager
    async def raw(self, request: Request) -> AsyncIterator[Upload]:
        """The body of `request`, as a file. Raises RequestError."""
        async with self._upload(request) as upload:
            await self._receive(request, upload.write)
            yield upload

    @asynccontextmanager
    async def _upload(self, request: Request) -> AsyncIterator[Upload]:
        owner = keys.owner_of(request.scope)
        if self._num_uploads[owner] >= MAX_UPLOADS:
            raise QueueFull(f"{MAX_UPLOADS} uploads are arriving, as many as one client may have.")
        self._num_uploads[owner] += 1
        try:
            upload = await self.run(self._store.begin)
            try:
                yield upload
            finally:
                with anyio.CancelScope(shield=True):
                    await self.run(self._store.end, upload)
        finally:
            self._num_uploads[owner] -= 1
            if not self._num_uploads[owner]:
                del self._num_uploads[owner]

    async def _receive(self, request: Request, write: Callable[[bytes], None]) -> None:
        body.check_size(request.headers, self._bounds)

        async def take(piece: bytes) -> None:
            await self.run(write, piece)

        await body.read_pieces(request.receive, take, self._bounds, self._arriving)
