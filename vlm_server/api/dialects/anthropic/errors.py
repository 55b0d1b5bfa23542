"""Errors in Anthropic's shape."""

from __future__ import annotations

from typing import Literal

import msgspec

from vlm_server.errors import ContextLengthExceeded, RequestError

PATH = "/v1/messages"
"""The routes whose errors have this shape begin so."""

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status; the others are `invalid_request_error` below 500 and `api_error` from there."""

_TOO_LONG = "prompt is too long"


class MoreDetails(msgspec.Struct, frozen=True):
    """The error's code, where Anthropic's clients look for it."""

    error_code: str


class ErrorDetail(msgspec.Struct, frozen=True):
    """`code` and `param` are ours: as OpenAI's errors have them."""

    type: str
    message: str
    code: str
    param: str | None
    details: MoreDetails


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail
    type: Literal["error"] = "error"


def encode(error: RequestError) -> bytes:
    """`error` as JSON: the body of a response, or the data of an event in a stream."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = TYPES.get(error.status, other)
    details = MoreDetails(error.code)
    detail = ErrorDetail(kind, _message(error), error.code, error.param, details)
    return msgspec.json.encode(ErrorBody(detail))


def _message(error: RequestError) -> str:
    """The message, with the words by which clients recognise a prompt that is too long."""
    is_known = not isinstance(error, ContextLengthExceeded) or _TOO_LONG in error.message
    return error.message if is_known else f"{_TOO_LONG}: {error.message}"
