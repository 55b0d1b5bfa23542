"""Failed requests as responses. The dialect encodes the body; OpenAI's shape is the default."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from vlm_server.errors import MethodNotAllowed, NotFound, RequestError
from vlm_server.nearest import nearest

EncodeError = Callable[[RequestError], bytes]
"""A dialect's JSON for an error."""
EncodeFor = Callable[[Scope], EncodeError]
"""Returns the `EncodeError` of the dialect of a request's route."""

_MAX_SHOWN_CHARS = 100
_MIN_SIMILARITY = 0.75
_RETRY_STATUSES = frozenset({429, 502, 503, 504})


def response(
    error: RequestError,
    encode: EncodeError,
    retry_after_seconds: float,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """`error` as a response; `Retry-After` is the error's own, or `retry_after_seconds`."""
    all_headers = dict(headers or {})
    seconds = error.retry_after_seconds
    if seconds is None and error.status in _RETRY_STATUSES:
        seconds = retry_after_seconds
    if seconds is not None:
        all_headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    if error.status == 401:
        all_headers["WWW-Authenticate"] = "Bearer"
    if error.status == 408:
        all_headers["Connection"] = "close"  # the rest of the body may never arrive
    return Response(encode(error), error.status, headers=all_headers, media_type="application/json")


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """The JSON of an error in OpenAI's shape."""

    error: ErrorDetail


def encode_openai(error: RequestError) -> bytes:
    """`error` in OpenAI's shape: the body of a response, or the data of an event in a stream."""
    detail = ErrorDetail(error.message, error.type, error.param, error.code)
    return msgspec.json.encode(ErrorBody(detail))


def not_found(request: Request, routes: Sequence[BaseRoute]) -> NotFound:
    """The error for a path without a route; it names the nearest of `routes`."""
    path = request.url.path[:_MAX_SHOWN_CHARS]
    shown_path = "".join(c if c.isprintable() and c != "`" else "?" for c in path)
    known_paths = {
        route.path: route
        for route in routes
        if isinstance(route, Route) and route.include_in_schema
    }
    known_path = _nearest(path.rstrip("/"), list(known_paths))
    advice = f" Do you mean `{_route_text(known_paths[known_path])}`?" if known_path else ""
    return NotFound(f"There is no route `{shown_path}`.{advice} The routes are listed at `/docs`.")


def method_not_allowed(request: Request, allowed_methods: str) -> MethodNotAllowed:
    """The error for a method that is not among the `allowed_methods` of the route."""
    return MethodNotAllowed(
        f"The method {request.method} is not allowed on this route, which takes {allowed_methods}."
    )


def _nearest(path: str, known_paths: list[str]) -> str | None:
    """The known path that ends with `path`, or is its end; else a similar one, if any."""
    if len(path) > 1:
        longer = [route for route in known_paths if route.endswith(path)]
        shorter = [route for route in known_paths if len(route) > 1 and path.endswith(route)]
        if nested := sorted(longer, key=len) or sorted(shorter, key=len, reverse=True):
            return nested[0]
    return nearest(path, known_paths, _MIN_SIMILARITY)


def _route_text(route: Route) -> str:
    methods = (route.methods or set()) - {"HEAD"}
    return f"{' '.join(sorted(methods))} {route.path}".strip()
