"""Errors in OpenAI's shape. Knows the error tree; knows nothing of where errors come from."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from vlm_server.errors import RequestError

_RETRY_STATUSES = frozenset({429, 502, 503})


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def encode(error: RequestError) -> bytes:
    """`error` as JSON: the body of a response, or the data of a stream's event."""
    detail = ErrorDetail(error.message, error.type, error.param, error.code)
    return msgspec.json.encode(ErrorBody(detail))


def response(
    error: RequestError, retry_after_seconds: float, headers: Mapping[str, str] | None = None
) -> Response:
    """`error` as a response; `Retry-After` is set where another try may succeed.

    It says what `error` knows of that itself, or else `retry_after_seconds`.
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
