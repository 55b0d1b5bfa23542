"""Errors in OpenAI's shape: of both of its dialects, and of the routes that are no dialect's."""

from __future__ import annotations

import msgspec

from vlm_server.errors import RequestError


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def encode(error: RequestError) -> bytes:
    """`error` as JSON: the body of a response, or the data of an event in a stream."""
    detail = ErrorDetail(error.message, error.type, error.param, error.code)
    return msgspec.json.encode(ErrorBody(detail))
