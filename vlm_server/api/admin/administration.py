"""Operators' routes: load, unload and pull models, clear caches, read the log.

All need an admin key where keys are required: see `http.access.gate`.
"""

from __future__ import annotations

import asyncio
import uuid
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from vlm_server.api.admin import on_disk
from vlm_server.api.admin.pulls import Pulls
from vlm_server.api.http import body
from vlm_server.api.http.generation import Generation
from vlm_server.api.parsing import json_body, served_models
from vlm_server.errors import (
    ConfigError,
    Conflict,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    NotFound,
)
from vlm_server.hub.find import LocalCheckpoint, find_by_name
from vlm_server.hub.names import HubName
from vlm_server.platform.log_tail import LogTail
from vlm_server.settings import Settings

_MAX_SHOWN_CHARS = 100
_MAX_DIGITS = 15


class ModelNamed(msgspec.Struct, forbid_unknown_fields=True):
    """The name of a served model or, to load it, of another one on this machine."""

    model: str


class ModelToLoad(ModelNamed, forbid_unknown_fields=True):
    """A model to load, which then stays unused for `keep_alive_seconds`; negative is for good."""

    keep_alive_seconds: Annotated[float, msgspec.Meta(ge=-1, le=1e9)] | None = None


class CachesOf(msgspec.Struct, forbid_unknown_fields=True):
    """The caches of `model`, or of all models."""

    model: str | None = None


class Administration:
    """The endpoints. Loads and downloads go on if their client disconnects."""

    def __init__(self, shared: Generation, settings: Settings, log_tail: LogTail) -> None:
        self._models = shared.models
        self._settings = settings
        self._arriving = shared.arriving
        self._pages = shared.documents.cache
        self._pulls = Pulls(settings)
        self._log_tail = log_tail

    async def load(self, request: Request) -> Response:
        """Load a model, also one on this machine that is not in the settings: it is then served."""
        wanted = await self._read(request, ModelToLoad)
        name = await self._to_load(wanted.model)
        try:
            await self._models.load(name)
            if wanted.keep_alive_seconds is not None:
                await self._models.touch(name, f"keep-{uuid.uuid4()}", wanted.keep_alive_seconds)
        except EngineUnavailable as error:
            if not (reason := self._models.status(name).error):
                raise
            raise EngineUnavailable(
                f"The model `{name}` can't be loaded: {reason}", "model", error.retry_after_seconds
            ) from None
        return self._state(name)

    async def unload(self, request: Request) -> Response:
        """Unload a model once it is not in use."""
        name = self._served_name((await self._read(request, ModelNamed)).model)
        await self._models.unload(name)
        return self._state(name)

    async def clear_caches(self, request: Request) -> Response:
        """Drop cache entries in memory that are not in use, and all drawn pages of documents."""
        model_name = (await self._read(request, CachesOf)).model
        if model_name is not None:
            names = [self._served_name(model_name)]
        else:
            names = [name for name in self._models.names if self._models.status(name).is_ready]
        for name in names:
            self._models.clear_caches(name)
        self._pages.clear()
        return JSONResponse({"cleared": names})

    async def pull(self, request: Request) -> Response:
        """Download a checkpoint of the hub, or follow a download; progress comes as lines of JSON.

        The last line has the `state` `done`, `cancelled`, or `failed` with an `error`.
        """
        name = await self._read_hub_name(request)
        lines = self._pulls.start(name).lines()
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def cancel_pull(self, request: Request) -> Response:
        """Cancel a download, keeping its files so far for the next one."""
        name = await self._read_hub_name(request)
        if not self._pulls.cancel(name):
            raise NotFound(f"`{name}` is not being downloaded.")
        return JSONResponse({"model": str(name), "cancelled": True})

    async def checkpoints(self, _: Request) -> Response:
        """The checkpoints on this machine, and the downloads in progress."""
        free_bytes = on_disk.free_bytes_for_models(self._models, self._settings)
        names = self._models.names
        on_disk_models = await asyncio.to_thread(
            on_disk.checkpoints, self._settings, names, free_bytes
        )
        return JSONResponse({"checkpoints": on_disk_models, "pulls": self._pulls.to_json()})

    async def log(self, request: Request) -> Response:
        """The kept lines of the log, or those after the number in the query."""
        after = request.query_params.get("after", "0")
        if not (after.isascii() and after.isdecimal() and len(after) <= _MAX_DIGITS):
            raise InvalidRequest("`after` must be the number of a line.", "after")
        lines = msgspec.to_builtins(self._log_tail.after(int(after)))
        return JSONResponse({"lines": lines, "last": self._log_tail.num_lines})

    def _state(self, name: str) -> Response:
        return JSONResponse({"model": name, "state": self._models.status(name).state})

    def _served_name(self, name: str) -> str:
        known_models = served_models.known_models(self._models)
        return served_models.find_model(name, known_models).name

    async def _to_load(self, name: str) -> str:
        """A model by its own name, else a checkpoint, else an alias, which `*` may be.

        Raises ModelNotFound, and Conflict if it is the name of several checkpoints.
        """
        if name in self._models.names:
            return name
        if await asyncio.to_thread(self._find, name) is not None:
            return self._models.add(name)
        try:
            return self._served_name(name)
        except ModelNotFound as error:
            raise ModelNotFound(
                f"There is no model `{name[:_MAX_SHOWN_CHARS]}` on this machine. {error.message}",
                "model",
            ) from None

    def _find(self, name: str) -> LocalCheckpoint | None:
        try:
            return find_by_name(name, self._settings.model.search_folders)
        except ConfigError:
            raise Conflict(
                "Several checkpoints on this machine have this name; say ORG/NAME.", "model"
            ) from None

    async def _read_hub_name(self, request: Request) -> HubName:
        name = HubName.parse((await self._read(request, ModelNamed)).model)
        if name is None:
            raise InvalidRequest(
                "`model` must be a name of the hub: ORG/NAME or ORG/NAME@REVISION.", "model"
            )
        return name

    async def _read(self, request: Request, kind: type[msgspec.Struct]) -> Any:
        fields = await body.read_small(request, self._settings.limits, self._arriving)
        action = json_body.convert(fields, kind, {})
        name = getattr(action, "model", None)
        if name is not None:
            json_body.utf8_length(name, "model")
        return action
