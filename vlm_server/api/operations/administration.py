"""What operators do to models while the daemon runs: load, unload, pull, clear caches.

All of it needs an admin key, where keys are needed: see `http.access.gate`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from vlm_server.api.http import body, served_models
from vlm_server.api.http.generation import Generation
from vlm_server.api.http.intake import json_body
from vlm_server.api.http.queue.arriving import ArrivingBodies
from vlm_server.checkpoints.download import fetch
from vlm_server.checkpoints.find import every
from vlm_server.checkpoints.messages import Progress
from vlm_server.checkpoints.names import HubName
from vlm_server.errors import InvalidRequest, PayloadTooLarge, VlmServerError
from vlm_server.settings import Settings
from vlm_server.supervisor.client import ModelClient


class ModelNamed(msgspec.Struct, forbid_unknown_fields=True):
    """A model that is served or, to be loaded, another one on this machine; by name only."""

    model: str


class CachesOf(msgspec.Struct, forbid_unknown_fields=True):
    """Without `model`, those of all models."""

    model: str | None = None


class Administration:
    """The endpoints. What they start goes on if their client leaves."""

    def __init__(self, shared: Generation, settings: Settings) -> None:
        self._models: ModelClient = shared.models
        self._settings = settings
        self._arriving: ArrivingBodies = shared.arriving
        self._pulls: dict[str, _Pull] = {}

    async def load(self, request: Request) -> Response:
        """Load a model; one that is on this machine, but not in the settings, is served too."""
        name = (await self._read(request, ModelNamed)).model
        known = self._served(name)
        await self._models.load(known)
        return JSONResponse({"model": known, "state": self._models.status(known).state})

    async def unload(self, request: Request) -> Response:
        """Unload a model once nobody uses it."""
        name = self._served((await self._read(request, ModelNamed)).model)
        await self._models.unload(name)
        return JSONResponse({"model": name, "state": self._models.status(name).state})

    async def clear_caches(self, request: Request) -> Response:
        """Drop what is cached in memory and not in use."""
        wanted = (await self._read(request, CachesOf)).model
        names = [self._served(wanted)] if wanted is not None else self._loaded()
        for name in names:
            self._models.clear_caches(name)
        return JSONResponse({"cleared": names})

    async def pull(self, request: Request) -> Response:
        """Download a checkpoint of the hub, with its progress as lines of JSON.

        Asked again for one that is on its way, it tells of that. The last line has the `state`
        `done`, or `failed` with an `error`.
        """
        text = (await self._read(request, ModelNamed)).model
        name = HubName.parse(text)
        if name is None:
            raise InvalidRequest("`model` must be a name of the hub: ORG/NAME or ORG/NAME@REVISION")
        running = self._pulls.get(str(name))
        if running is None or running.task.done():
            running = self._pulls[str(name)] = _Pull(name, self._settings)
        return StreamingResponse(running.lines(), media_type="application/x-ndjson")

    async def checkpoints(self, _: Request) -> Response:
        """What is on this machine, and whether it is served."""
        return JSONResponse({"checkpoints": await asyncio.to_thread(self._checkpoints)})

    def _checkpoints(self) -> list[dict[str, Any]]:
        found = every(self._settings.model.search_paths)
        return [
            {
                "name": one.name,
                "place": one.place,
                "complete": one.is_complete,
                "bytes": _weight_bytes(one.folder),
                "served": one.name in self._models.names,
            }
            for one in found
        ]

    def _loaded(self) -> list[str]:
        return [name for name in self._models.names if self._models.status(name).is_ready]

    def _known(self, name: str) -> str | None:
        known = served_models.known_models(self._models, self._settings.server)
        model = served_models.model_of(name, known)
        return None if model is None else model.name

    def _served(self, name: str) -> str:
        return self._known(name) or self._models.add(name)

    async def _read(self, request: Request, kind: type[msgspec.Struct]) -> Any:
        limits = self._settings.limits
        body.check_headers(Headers(scope=request.scope), limits)
        data = await body.read(request.receive, limits, self._arriving)
        if not json_body.is_small(data):
            raise PayloadTooLarge("The request's body is too large for this route.")
        asked = json_body.convert(json_body.parse_object(data), kind, {})
        name = getattr(asked, "model", None)
        if name is not None:
            json_body.utf8_length(name, "model")
        return asked


class _Pull:
    """One download, and all who watch it."""

    def __init__(self, name: HubName, settings: Settings) -> None:
        self._name = name
        self._settings = settings
        self._news: dict[str, Any] = {"state": "downloading", "model": str(name)}
        self._changed = asyncio.Condition()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await fetch(self._name, self._settings.model, self._settings.memory, self._take)
            news: dict[str, Any] = {"state": "done", "model": self._name.repo}
        except VlmServerError as error:
            news = {"state": "failed", "model": self._name.repo, "error": str(error)}
        await self._tell(news)

    def _take(self, progress: Progress) -> None:
        self._news = {
            "state": "downloading",
            "model": self._name.repo,
            "file": progress.file,
            "bytes": progress.done_bytes,
            "total_bytes": progress.total_bytes,
        }

    async def _tell(self, news: dict[str, Any]) -> None:
        self._news = news
        async with self._changed:
            self._changed.notify_all()

    async def lines(self) -> AsyncIterator[bytes]:
        """What there is to tell, once a second and at the end."""
        told = None
        while True:
            news = self._news
            if news != told:
                told = news
                yield json.dumps(news).encode() + b"\n"
            if self.task.done() or news["state"] != "downloading":
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TELL_SECONDS), self._changed:
                    await self._changed.wait()


_TELL_SECONDS = 1.0


def _weight_bytes(folder: Path) -> int:
    """Of the files with weights; 0 where they can't be read."""
    try:
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    except OSError:
        return 0
