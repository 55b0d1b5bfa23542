"""Anthropic's routes of batches: their requests come in one body, and their results as one file.

A Message Batch is a batch like others, whose file of lines is made from the body.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import BinaryIO

import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from vlm_server.api.batches import split_process
from vlm_server.api.batches.batch import MESSAGES, Batch, new_batch, new_id
from vlm_server.api.batches.finish import CANCELLED, EXPIRED
from vlm_server.api.batches.lane import Lane
from vlm_server.api.batches.split_process import SplitLines
from vlm_server.api.dialects import pages
from vlm_server.api.dialects.batches.endpoints import Batches
from vlm_server.api.dialects.pages import Json
from vlm_server.api.fair_turns import FairPool
from vlm_server.api.files.index import StoredFile
from vlm_server.api.files.store import FileStore
from vlm_server.api.http import body
from vlm_server.api.http.access import keys
from vlm_server.api.http.answer import json_response
from vlm_server.api.http.connection.exchange import wait_until_read
from vlm_server.api.http.generation import Generation
from vlm_server.errors import (
    Conflict,
    NotFound,
    RequestError,
    RequestTooCostly,
)
from vlm_server.platform.child.pool import ChildFailed, ChildTimeout
from vlm_server.settings import MIB, Settings

PATH = "/v1/messages/batches"
_MAX_PAGE = 1000
_PIECE_BYTES = 256 << 10
_MODULE = "vlm_server.api.batches.split_process"


class MessageBatches(Batches):
    """`/v1/messages/batches`."""

    kind = MESSAGES

    def __init__(self, shared: Generation, settings: Settings, lane: Lane) -> None:
        super().__init__(shared, settings, lane)
        limits, batches = settings.limits, settings.batches
        self._seconds = limits.parsing_timeout_seconds
        self._pool = FairPool(
            _MODULE,
            1,
            self._seconds,
            batches.max_lines,
            batches.max_line_bytes,
            outcome=SplitLines,
            memory_bytes=256 * MIB + 8 * limits.max_body_bytes,
        )

    async def create(self, request: Request) -> Response:
        shared, owner = self._shared, keys.owner_of(request.scope)
        store = self._store(request)
        body.check_headers(request.headers, shared.limits)
        slots, client = shared.queue_slots, keys.key_of(request.scope).name
        slots.check(client, request.headers)
        data = await body.read(request.receive, shared.limits, shared.arriving)
        with slots.hold(client, len(data)) as slot:
            reading = self._split(owner, data)
            lines = await body.until_disconnect(request.receive, reading)
            slot.reserve(len(data) + len(lines.data))
            batch_id = new_id(MESSAGES)
            save = partial(_save, shared.files, owner, lines.data, f"{batch_id}_input.jsonl")
            file = await anyio.to_thread.run_sync(save)
        batch = new_batch(
            owner,
            batch_id,
            file.id,
            split_process.ENDPOINT,
            hours=24,
            window="24h",
            total=lines.number,
        )
        try:
            await self._add(store, batch)
        except RequestError:
            await anyio.to_thread.run_sync(shared.files.delete, file)
            raise
        self._store(request)  # tells the lane
        return self._json(batch)

    async def list(self, request: Request) -> Response:
        limit = pages.limit_of(request.query_params, 20, _MAX_PAGE)
        before = await self._known(request, "before_id")
        after = await self._known(request, "after_id")
        pages.check_exclusive(before, after)
        page_of = partial(self._store(request).page, newest_first=not before)
        arguments = keys.owner_of(request.scope), self.kind, before or after, limit + 1
        found = await anyio.to_thread.run_sync(page_of, *arguments)
        return json_response(pages.page(found, limit, self._object, is_reversed=bool(before)))

    async def cancel(self, request: Request) -> Response:
        batch = await self._find(request)
        return self._json(batch) if not batch.is_active else await super().cancel(request)

    async def results(self, request: Request) -> Response:
        """The results of a batch that has ended, in lines. Raises NotFound and Conflict."""
        batch = await self._find(request)
        if batch.is_active:
            raise Conflict("The batch has not ended yet.")
        if batch.fault:
            raise NotFound("The batch has no results: its requests were deleted, or it failed.")
        readers = await anyio.to_thread.run_sync(_open, self._shared.files, batch)

        async def pieces() -> AsyncIterator[bytes]:
            try:
                for reader in readers:
                    while lines := await anyio.to_thread.run_sync(reader.readlines, _PIECE_BYTES):
                        yield await anyio.to_thread.run_sync(results, lines)
                        await wait_until_read(request.scope)
            finally:
                for reader in readers:
                    reader.close()

        return StreamingResponse(pieces(), media_type="application/x-jsonl")

    async def delete(self, request: Request) -> Response:
        """Forget a batch that has ended, and drop its results."""
        batch, store = await self._find(request), self._store(request)
        if batch.is_active:
            raise Conflict("The batch has not ended yet: cancel it first.")

        def forget() -> None:
            for file_id in (batch.output_file_id, batch.error_file_id):
                if file := self._shared.files.find(batch.owner, file_id):
                    self._shared.files.delete(file)
            store.delete(batch)

        await anyio.to_thread.run_sync(forget)
        return json_response({"id": batch.id, "type": "message_batch_deleted"})

    async def _split(self, owner: str, data: bytearray) -> SplitLines:
        """The lines for the requests in a body. Raises RequestError."""
        try:
            return await self._pool.run(data, owner, self._seconds)
        except (ChildTimeout, ChildFailed):
            raise RequestTooCostly("Reading the request takes too much time or memory.") from None

    def _object(self, batch: Batch) -> pages.Json:
        return batch_object(batch, self._lane.paused_of(batch))


def _save(files: FileStore, owner: str, data: bytes, name: str) -> StoredFile:
    with files.upload() as upload:
        upload.write(data)
        return files.add(owner, upload, name, "batch")


def _open(files: FileStore, batch: Batch) -> list[BinaryIO]:
    """The files of results. Raises NotFound if one was dropped."""
    wanted, readers = list[str](), list[BinaryIO]()
    if batch.completed:
        wanted.append(batch.output_file_id)
    if batch.failed or batch.unfinished:
        wanted.append(batch.error_file_id)
    for file_id in wanted:
        file = files.find(batch.owner, file_id)
        reader = None if file is None else files.open(file)
        if reader is None:
            for opened in readers:
                opened.close()
            raise NotFound("The results were deleted or dropped (files.keep_seconds).")
        readers.append(reader)
    return readers


_ENDS = {EXPIRED: "expired", CANCELLED: "canceled"}


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Line(msgspec.Struct):
    """A line of an output or error file."""

    custom_id: str
    response: _Response | None
    error: _Error | None


_decoder = msgspec.json.Decoder(_Line)


def batch_object(batch: Batch, paused: str | None) -> Json:
    """Anthropic's object of a batch, and `paused`: why no request of it is begun."""
    num_done = batch.completed + batch.failed + batch.unfinished
    is_cancelled = batch.status in ("cancelling", "cancelled")
    status = "canceling" if batch.status == "cancelling" else "in_progress"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status if batch.is_active else "ended",
        "request_counts": {
            "processing": batch.total - num_done if batch.is_active else 0,
            "succeeded": batch.completed,
            "errored": batch.total if batch.status == "failed" else batch.failed,
            "canceled": batch.unfinished if is_cancelled else 0,
            "expired": 0 if is_cancelled else batch.unfinished,
        },
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "cancel_initiated_at": _time(batch.cancelling_at),
        "ended_at": None if batch.is_active else _time(batch.ended_at),
        "archived_at": None,
        "results_url": None if batch.is_active else f"/v1/messages/batches/{batch.id}/results",
        "paused": paused,
    }


def results(lines: Sequence[bytes]) -> bytes:
    """Lines of an output or error file as those of Anthropic's results."""
    encode = msgspec.json.encode
    return b"".join(encode(_result(_decoder.decode(line))) + b"\n" for line in lines)


def _result(line: _Line) -> Json:
    result: Json
    if line.response is not None and line.response.status_code == 200:
        result = {"type": "succeeded", "message": line.response.body}
    elif line.response is not None:
        result = {"type": "errored", "error": line.response.body}
    else:
        assert line.error is not None
        error = {"type": "api_error", "message": line.error.message}
        result = {"type": "errored", "error": {"type": "error", "error": error}}
        if line.error.code in _ENDS:
            result = {"type": _ENDS[line.error.code]}
    return {"custom_id": line.custom_id, "result": result}


def _time(seconds: int | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
