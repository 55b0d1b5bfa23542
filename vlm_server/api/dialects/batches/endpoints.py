"""OpenAI's routes of batches. Each client sees its own batches alone."""

from __future__ import annotations

import time
from functools import partial

import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vlm_server.api.batches.batch import Batch, new_batch, new_id
from vlm_server.api.batches.lane import Lane
from vlm_server.api.batches.store import BatchStore
from vlm_server.api.dialects import pages
from vlm_server.api.dialects.batches.schema import parse
from vlm_server.api.dialects.pages import Json
from vlm_server.api.http import access_log, body
from vlm_server.api.http.access import keys
from vlm_server.api.http.answer import json_response
from vlm_server.api.http.generation import Generation
from vlm_server.api.parsing.ignored_fields import IgnoredFields
from vlm_server.errors import Conflict, InvalidRequest, NotFound, QueueFull
from vlm_server.settings import Settings

PATH = "/v1/batches"
_MAX_PAGE = 100

_ENDS = ("failed", "completed", "expired", "cancelled")


class Batches:
    """`/v1/batches`."""

    kind = "batch_"
    """Begins the ids of its batches."""

    def __init__(self, shared: Generation, settings: Settings, lane: Lane) -> None:
        self._shared = shared
        self._settings = settings
        self._lane = lane

    async def create(self, request: Request) -> Response:
        shared, ignored = self._shared, IgnoredFields()
        fields = await body.read_small(request, shared.limits, shared.arriving)
        refuses = self._settings.server.unknown_fields == "refuse"
        wanted = parse(fields, ignored, refuses=refuses)
        access_log.entry_of(request.scope).ignored = ignored.names
        store, owner = self._store(request), keys.owner_of(request.scope)
        find = partial(shared.files.find, owner, wanted.input_file_id)
        file = await anyio.to_thread.run_sync(find)
        if file is None or file.purpose != "batch":
            raise InvalidRequest(
                "There is no such file of the purpose 'batch': upload it first, with this API key.",
                "input_file_id",
            )
        batch = new_batch(
            owner,
            new_id(self.kind),
            wanted.input_file_id,
            wanted.endpoint,
            hours=wanted.hours,
            window=wanted.completion_window,
            metadata=wanted.metadata,
        )
        await self._add(store, batch)
        self._store(request)  # tells the lane
        return self._json(batch)

    async def list(self, request: Request) -> Response:
        limit = pages.limit_of(request.query_params, 20, _MAX_PAGE)
        after = await self._known(request, "after")
        page_of = partial(
            self._store(request).page, keys.owner_of(request.scope), self.kind, after, limit + 1
        )
        found = await anyio.to_thread.run_sync(page_of)
        return json_response(pages.page(found, limit, self._object, object="list"))

    async def retrieve(self, request: Request) -> Response:
        return self._json(await self._find(request))

    async def cancel(self, request: Request) -> Response:
        """Cancel a batch: those of its lines that have a result keep it."""
        batch = await self._find(request)
        if batch.status in ("validating", "in_progress"):
            values = {"status": "cancelling", "cancelling_at": int(time.time())}
            await anyio.to_thread.run_sync(partial(self._store(request).change, batch, **values))
            batch = await self._find(request)
        if batch.status not in ("cancelling", "cancelled"):
            raise Conflict(f"The batch can't be cancelled: it is {batch.status}.")
        self._store(request)  # tells the lane
        return self._json(batch)

    def _store(self, request: Request) -> BatchStore:
        return self._lane.begin(request.app)

    async def _add(self, store: BatchStore, batch: Batch) -> None:
        limit = self._settings.batches.max_batches_per_key
        if not await anyio.to_thread.run_sync(store.add, batch, limit):
            raise QueueFull(
                f"{limit} batches of this key have not ended, as many as it may have "
                "(batches.max_batches_per_key)."
            )

    async def _known(self, request: Request, name: str) -> str | None:
        """The id of a batch in the query's parameter `name`, if any."""
        batch_id = request.query_params.get(name)
        if batch_id is not None and await self._look_up(request, batch_id) is None:
            raise InvalidRequest(f"`{name}` is the id of none of the batches.", name)
        return batch_id

    async def _find(self, request: Request) -> Batch:
        batch = await self._look_up(request, request.path_params["batch_id"])
        if batch is None:
            raise NotFound("There is no such batch of this API key.")
        return batch

    async def _look_up(self, request: Request, batch_id: str) -> Batch | None:
        find, owner = self._store(request).find, keys.owner_of(request.scope)
        if not batch_id.startswith(self.kind):
            return None
        return await anyio.to_thread.run_sync(find, owner, batch_id)

    def _object(self, batch: Batch) -> pages.Json:
        return batch_object(batch, self._lane.paused_of(batch))

    def _json(self, batch: Batch) -> Response:
        return json_response(self._object(batch))


def batch_object(batch: Batch, paused: str | None) -> Json:
    """OpenAI's object of a batch, and `paused`: why no line of it is begun."""
    failed = batch.failed + batch.unfinished
    has_files = batch.status in ("completed", "expired", "cancelled")
    faults = msgspec.json.decode(batch.fault) if batch.fault else None
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": None if faults is None else {"object": "list", "data": faults},
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id if has_files and batch.completed else None,
        "error_file_id": batch.error_file_id if has_files and failed else None,
        "created_at": batch.created_at,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.finalizing_at,
        "cancelling_at": batch.cancelling_at,
        **{f"{end}_at": batch.ended_at if batch.status == end else None for end in _ENDS},
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": failed,
        },
        "metadata": msgspec.json.decode(batch.metadata),
        "paused": paused,
    }
