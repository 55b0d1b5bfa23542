"""Reads a request's body within the limits on type, size and time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive

from vlm_server.api.http.disconnect import ClientGone
from vlm_server.api.http.queue.arriving import Arrival, ArrivingBodies
from vlm_server.api.parsing import json_body
from vlm_server.errors import (
    PayloadTooLarge,
    QueueFull,
    RequestTimeout,
    UnsupportedMediaType,
)
from vlm_server.settings import Limits


def check_headers(headers: Headers, limits: Limits, *, any_type: bool = False) -> None:
    """Refuse by its headers a body that is not plain JSON, or too large.

    With `any_type` its type may be called anything. Raises UnsupportedMediaType or PayloadTooLarge.
    """
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not any_type:
        raise UnsupportedMediaType("The Content-Type must be application/json.")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaType("Content-Encoding is not supported; send the JSON uncompressed.")
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limits.max_body_bytes:
        raise _too_large(limits)


async def read(receive: Receive, limits: Limits, arriving: ArrivingBodies) -> bytearray:
    """The whole body, its size checked while it arrives, whatever Content-Length says.

    Raises PayloadTooLarge, RequestTimeout, QueueFull if it had to give way to other bodies, or
    ClientGone.
    """
    is_refused = False
    try:
        async with asyncio.timeout(limits.body_timeout_seconds) as deadline:
            with arriving.arrival(deadline) as arrival:
                try:
                    return await _collect(receive, limits, arriving, arrival)
                finally:
                    is_refused = arrival.is_refused
    except TimeoutError:
        if is_refused:
            raise QueueFull(
                "Too many large bodies are arriving (limits.max_arriving_bytes), and this one has "
                "taken longest; try again."
            ) from None
        raise RequestTimeout(
            f"The request's body did not arrive within {limits.body_timeout_seconds:g} seconds "
            "(limits.body_timeout_seconds)."
        ) from None


def discard(body: bytearray) -> None:
    """Free the memory of `body`, whoever holds it still: the traceback of an error, say."""
    with contextlib.suppress(BufferError):  # a cancelled text is still being read: it is small
        body.clear()


async def read_small(
    request: Request, limits: Limits, arriving: ArrivingBodies, *, any_type: bool = False
) -> dict[str, Any]:
    """The JSON object of a request that is parsed at once, since it is small.

    Raises what `check_headers`, `read` and `json_body.parse_object` raise.
    """
    check_headers(Headers(scope=request.scope), limits, any_type=any_type)
    data = await read(request.receive, limits, arriving)
    if not json_body.is_small(data):
        raise PayloadTooLarge("The request's body is too large for this route.")
    return json_body.parse_object(data)


async def _collect(
    receive: Receive, limits: Limits, arriving: ArrivingBodies, arrival: Arrival
) -> bytearray:
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        body += piece
        arriving.add(arrival, len(piece))
        if len(body) > limits.max_body_bytes:
            raise _too_large(limits)
        more = message.get("more_body", False)
    return body


def _too_large(limits: Limits) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"The request's body is larger than {limits.max_body_bytes} bytes (limits.max_body_bytes)."
    )
