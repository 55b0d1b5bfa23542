"""The errors for a path that there is no route for, which names the nearest one, and for a method
that a route does not take."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from vlm_server.errors import MethodNotAllowed, NotFound

_MAX_SHOWN_CHARS = 100
_LEAST_SIMILARITY = 0.75


def not_found(request: Request, routes: Sequence[BaseRoute]) -> NotFound:
    """The error for `request`, whose path is none of `routes`."""
    path = request.url.path[:_MAX_SHOWN_CHARS]
    shown = "".join(c if c.isprintable() and c != "`" else "?" for c in path)
    known = {
        route.path: route
        for route in routes
        if isinstance(route, Route) and route.include_in_schema
    }
    nearest = _nearest(path.rstrip("/"), list(known))
    advice = f" Do you mean `{_shown(known[nearest])}`?" if nearest else ""
    return NotFound(f"There is no route `{shown}`.{advice} The routes are listed in docs/api.md.")


def method_not_allowed(request: Request, allowed: str) -> MethodNotAllowed:
    """The error for `request`, whose path is a route with other methods: `allowed`."""
    return MethodNotAllowed(
        f"The method {request.method} is not allowed on this route, which takes {allowed}."
    )


def _nearest(path: str, known: list[str]) -> str | None:
    """The one of `known` that `path` has too much or too little before; else a similar one."""
    if len(path) > 1:
        longer = [each for each in known if each.endswith(path)]
        shorter = [each for each in known if len(each) > 1 and path.endswith(each)]
        if nested := sorted(longer, key=len) or sorted(shorter, key=len, reverse=True):
            return nested[0]
    similar = difflib.get_close_matches(path, known, 1, _LEAST_SIMILARITY)
    return similar[0] if similar else None


def _shown(route: Route) -> str:
    methods = (route.methods or set()) - {"HEAD"}
    return f"{' '.join(sorted(methods))} {route.path}".strip()
