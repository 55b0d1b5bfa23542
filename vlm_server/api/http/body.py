"""Reads a request's body within its limits. Knows ASGI and headers; knows no schema."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import Receive

from vlm_server.api.http.disconnect import ClientGone
from vlm_server.errors import PayloadTooLarge, RequestTimeout, UnsupportedMediaType
from vlm_server.settings import Limits


def check_headers(headers: Headers, limits: Limits) -> None:
    """Refuses what isn't plain JSON, or says itself that it is too large, before reading."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise UnsupportedMediaType("The Content-Type must be application/json.")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaType("A Content-Encoding is not taken; send the JSON as it is.")
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limits.max_body_bytes:
        raise _too_large(limits)


async def read(receive: Receive, limits: Limits) -> bytearray:
    """The whole body, counted while it arrives, whatever its Content-Length says.

    Raises PayloadTooLarge, RequestTimeout or ClientGone.
    """
    try:
        async with asyncio.timeout(limits.body_timeout_seconds):
            return await _collect(receive, limits)
    except TimeoutError:
        raise RequestTimeout(
            f"The request's body did not arrive within {limits.body_timeout_seconds:g} seconds."
        ) from None


async def _collect(receive: Receive, limits: Limits) -> bytearray:
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > limits.max_body_bytes:
            raise _too_large(limits)
        more = message.get("more_body", False)
    return body


def _too_large(limits: Limits) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request's body is larger than {limits.max_body_bytes} bytes.")
