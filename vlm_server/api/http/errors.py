"""A failed request as a response: its status and headers. The dialect encodes the body."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from starlette.responses import Response
from starlette.types import Scope

from vlm_server.errors import RequestError

EncodeError = Callable[[RequestError], bytes]
"""A dialect's JSON for an error."""
EncodeFor = Callable[[Scope], EncodeError]
"""That of the dialect whose route was asked for."""

_RETRY_STATUSES = frozenset({429, 502, 503, 504})


def response(
    error: RequestError,
    encode: EncodeError,
    retry_after_seconds: float,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """`error` as a response, with `Retry-After` if another try may succeed.

    Its value is the error's own where it has one, else `retry_after_seconds`.
    """
    all_headers = dict(headers or {})
    seconds = error.retry_after_seconds
    if seconds is None and error.status in _RETRY_STATUSES:
        seconds = retry_after_seconds
    if seconds is not None:
        all_headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    if error.status == 401:
        all_headers["WWW-Authenticate"] = "Bearer"
    if error.status == 408:
        all_headers["Connection"] = "close"  # the rest of the body may never come
    return Response(encode(error), error.status, headers=all_headers, media_type="application/json")
