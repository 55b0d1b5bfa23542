"""The error for a path that there is no route for: it names the path and the nearest route."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from vlm_server.errors import NotFound

_MAX_SHOWN_CHARS = 100
_LEAST_SIMILARITY = 0.6


def not_found(request: Request, routes: Sequence[BaseRoute]) -> NotFound:
    """The error for `request`, whose path is none of `routes`."""
    path = request.url.path[:_MAX_SHOWN_CHARS]
    shown = "".join(c if c.isprintable() and c != "`" else "?" for c in path)
    known = {route.path: route for route in routes if isinstance(route, Route)}
    nearest = difflib.get_close_matches(path, known, 1, _LEAST_SIMILARITY)
    advice = f" Do you mean `{_shown(known[nearest[0]])}`?" if nearest else ""
    return NotFound(f"There is no route `{shown}`.{advice} The routes are listed in docs/api.md.")


def _shown(route: Route) -> str:
    methods = (route.methods or set()) - {"HEAD"}
    return f"{' '.join(sorted(methods))} {route.path}".strip()
