"""Errors in Ollama's shape."""

from __future__ import annotations

import msgspec

from vlm_server.errors import RequestError


class ErrorBody(msgspec.Struct, frozen=True):
    error: str


def encode(error: RequestError) -> bytes:
    """`error` as JSON: the body of a response, or a line of a stream. The field at fault is named
    in its text, since there is no other place for it."""
    text = error.message
    if error.param and error.param not in text:
        text = f"{text} (`{error.param}`)"
    return msgspec.json.encode(ErrorBody(text))
