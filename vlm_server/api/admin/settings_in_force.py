"""`/v1/settings`: all settings, and where each was given. Never a key."""

from __future__ import annotations

from functools import cached_property

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vlm_server.settings import Settings, Sources, described


class SettingsInForce:
    """The endpoint. Settings do not change while the daemon runs."""

    def __init__(self, settings: Settings, sources: Sources) -> None:
        self._settings, self._sources = settings, sources

    @cached_property
    def _body(self) -> bytes:
        return msgspec.json.encode({"sections": described(self._settings, self._sources)})

    async def show(self, _: Request) -> Response:
        return Response(self._body, media_type="application/json")
