"""CORS: web pages of the origins in `server.cors_origins` may use the API."""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

_ANY = "*"
_SCOPE_KEY = "vlm_server.is_listed_origin"
_EXPOSED_HEADERS = (
    "Request-Id",
    "Retry-After",
    "Server-Timing",
    "X-Request-Id",
    "X-VLM-Ignored",
    "X-VLM-Routing-Key",
)
"""Response headers that pages may read."""


class Cors:
    """Answers preflights of listed origins and marks their requests; the gate refuses the rest."""

    def __init__(self, app: ASGIApp, origins: Iterable[str]) -> None:
        self.app = app
        names = [origin.lower() for origin in origins]
        self._listed = CORSMiddleware(
            app,
            allow_origins=[_ANY] if _ANY in names else [],
            allow_origin_regex="|".join(map(_pattern, names)) or None,
            allow_methods=("GET", "HEAD", "POST", "PUT", "DELETE"),
            allow_headers=(_ANY,),
            allow_private_network=True,
            expose_headers=_EXPOSED_HEADERS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = Headers(scope=scope).get("origin")
        scope[_SCOPE_KEY] = origin is not None and self._listed.is_allowed_origin(origin)
        app = self._listed if scope[_SCOPE_KEY] else self.app
        await app(scope, receive, send)


def is_listed(scope: Scope) -> bool:
    """Whether a request comes from a page of a listed origin."""
    return bool(scope[_SCOPE_KEY])


def _pattern(origin: str) -> str:
    """A pattern for `origin`, which may end in `*` for any name: `chrome-extension://*`."""
    return re.escape(origin).replace(re.escape(_ANY), ".*")
