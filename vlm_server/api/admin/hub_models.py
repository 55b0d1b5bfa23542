"""Models to get: the catalog that comes with the program, and searches of the hub."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vlm_server.api.admin import on_disk
from vlm_server.errors import Conflict, InvalidRequest, NotAvailable
from vlm_server.hub.catalog import CATALOG
from vlm_server.hub.download import library_environment
from vlm_server.hub.find import find_all
from vlm_server.hub.messages import FoundModel, SearchResult
from vlm_server.platform.child import launch
from vlm_server.settings import Settings
from vlm_server.supervisor.engine_process.client import ModelClient
from vlm_server.supervisor.models.memory_shares import needed_bytes

_MAX_QUERY_CHARS = 100
_MAX_SEARCHES = 2
_SEARCH = "vlm_server.hub.search_process"
_SEARCH_SECONDS = 20.0


class HubModels:
    """The endpoints. At most two searches run at a time, each in a process."""

    def __init__(self, models: ModelClient, settings: Settings) -> None:
        self._models = models
        self._settings = settings
        self._num_searches = 0

    async def catalog(self, _: Request) -> Response:
        """Checkpoints to begin with, and whether each fits and is on this machine."""
        described = [(entry.about_bytes, msgspec.to_builtins(entry)) for entry in CATALOG]
        return JSONResponse({"models": await self._with_fits(described)})

    async def search(self, request: Request) -> Response:
        """Checkpoints of the hub whose names have the `query`; `problem` says why there are none.

        Raises InvalidRequest, and Conflict if two searches are running.
        """
        query = request.query_params.get("query", "").strip()
        if not 0 < len(query) <= _MAX_QUERY_CHARS or not query.isprintable():
            raise InvalidRequest(f"`query` must have 1 to {_MAX_QUERY_CHARS} characters.", "query")
        if self._num_searches >= _MAX_SEARCHES:
            raise Conflict("Other searches are running: try again when they have ended.", "query")
        self._num_searches += 1
        try:
            found = await _search(query)
        except NotAvailable as error:
            return JSONResponse({"models": [], "problem": str(error)})
        finally:
            self._num_searches -= 1
        described = [(model.weight_bytes, msgspec.to_builtins(model)) for model in found]
        return JSONResponse({"models": await self._with_fits(described), "problem": None})

    async def _with_fits(
        self, described: Iterable[tuple[int, dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        """`described` models, each after the size of its weights, 0 if unknown, with more facts."""
        paths, room = (
            self._settings.model.search_folders,
            self._settings.memory.min_model_room_bytes,
        )
        here = await asyncio.to_thread(
            lambda: {local.name for local in find_all(paths) if local.is_complete}
        )
        free_bytes = on_disk.free_bytes_for_models(self._models, self._settings)

        def fits(size: int) -> bool | None:
            unknown = free_bytes is None or not size
            return None if unknown else needed_bytes(size, room) <= (free_bytes or 0)

        return [
            {**facts, "fits": fits(size), "here": facts["name"] in here}
            for size, facts in described
        ]


async def _search(query: str) -> tuple[FoundModel, ...]:
    """Checkpoints of the hub whose names have `query`, by their downloads. Raises NotAvailable."""
    command = launch.command(_SEARCH, query)
    environment = {**launch.environment(), **library_environment()}
    try:
        async with launch.run_process(command, environment) as process:
            output, _ = await asyncio.wait_for(process.communicate(), _SEARCH_SECONDS)
        result = msgspec.json.decode(output, type=SearchResult)
    except TimeoutError:
        raise NotAvailable(f"the hub did not answer within {_SEARCH_SECONDS:.0f} s") from None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise NotAvailable("the hub can't be searched: the log says why") from error
    if result.refusal:
        raise NotAvailable(result.refusal)
    return result.models
