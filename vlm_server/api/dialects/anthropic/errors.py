"""Errors in Anthropic's shape."""

from __future__ import annotations

import msgspec

from vlm_server.errors import ContextLengthExceeded, RequestError

PATH = "/v1/messages"
"""Prefix of the routes whose errors have this shape."""

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
"""Error types by status; others are `invalid_request_error` below 500, else `api_error`."""

_TOO_LONG = "prompt is too long"


def encode(error: RequestError) -> bytes:
    """`error` as JSON: the body of a response, or the data of an event in a stream.

    `code` and `param` are those of OpenAI's errors; Anthropic's clients read the code in `details`.
    """
    default_type = "invalid_request_error" if error.status < 500 else "api_error"
    detail = {
        "type": TYPES.get(error.status, default_type),
        "message": _message(error),
        "code": error.code,
        "param": error.param,
        "details": {"error_code": error.code},
    }
    return msgspec.json.encode({"error": detail, "type": "error"})


def _message(error: RequestError) -> str:
    """The message, with the words that clients look for if the prompt is too long."""
    is_known = not isinstance(error, ContextLengthExceeded) or _TOO_LONG in error.message
    return error.message if is_known else f"{_TOO_LONG}: {error.message}"
