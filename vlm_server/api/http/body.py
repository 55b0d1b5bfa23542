"""Request bodies, within limits on type, size and time, and clients that disconnect."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive

from vlm_server.api.parsing import json_body
from vlm_server.errors import PayloadTooLarge, QueueFull, RequestTimeout, UnsupportedMediaType
from vlm_server.settings import Limits

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before the response was complete."""


class Arrival:
    """An arriving body; refusing it moves `deadline` to now."""

    def __init__(self, deadline: asyncio.Timeout) -> None:
        self.num_bytes = 0
        self.is_refused = False
        self._deadline = deadline
        self._since = asyncio.get_running_loop().time()

    def cost(self, now: float) -> float:
        return self.num_bytes * (now - self._since)

    def refuse(self) -> None:
        """End the wait for the rest of the body."""
        with contextlib.suppress(RuntimeError):  # it has just timed out
            self._deadline.reschedule(asyncio.get_running_loop().time())
            self.is_refused = True


class ArrivingBodies:
    """All arriving bodies; beyond `limit_bytes` in all, the costliest is refused.

    The cost of a body is its bytes times seconds: a large one that is sent fast costs little.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._arrivals: set[Arrival] = set()
        self._num_bytes = 0

    @contextmanager
    def arrival(self, deadline: asyncio.Timeout) -> Iterator[Arrival]:
        """A body that arrives during the `with` block, within `deadline`."""
        arrival = Arrival(deadline)
        self._arrivals.add(arrival)
        try:
            yield arrival
        finally:
            self._num_bytes -= arrival.num_bytes
            self._arrivals.discard(arrival)

    def add(self, arrival: Arrival, num_bytes: int) -> None:
        """`num_bytes` more of the body have arrived."""
        arrival.num_bytes += num_bytes
        self._num_bytes += num_bytes
        excess = self._num_bytes - self._limit_bytes
        if excess <= 0:
            return
        now = asyncio.get_running_loop().time()
        for costly in sorted(self._arrivals, key=lambda one: one.cost(now), reverse=True):
            if excess <= 0:
                return
            if not costly.is_refused:
                costly.refuse()
            excess -= costly.num_bytes


@dataclass(frozen=True, slots=True)
class BodyBounds:
    """Bounds on the size and time of a body, with the names of their settings, for errors."""

    max_bytes: int
    seconds: float
    size_setting: str
    time_setting: str
    arriving_setting: str

    def too_large(self) -> PayloadTooLarge:
        limit, name = self.max_bytes, self.size_setting
        return PayloadTooLarge(f"The request's body is larger than {limit} bytes ({name}).")


def bounds_of(limits: Limits) -> BodyBounds:
    """The bounds of a JSON body."""
    return BodyBounds(
        limits.max_body_bytes,
        limits.body_timeout_seconds,
        "limits.max_body_bytes",
        "limits.body_timeout_seconds",
        "limits.max_arriving_bytes",
    )


def check_headers(headers: Headers, limits: Limits, *, any_type: bool = False) -> None:
    """Raises PayloadTooLarge, or UnsupportedMediaType without `any_type`, by the headers."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not any_type:
        raise UnsupportedMediaType("The Content-Type must be application/json.")
    check_size(headers, bounds_of(limits))


def check_size(headers: Headers, bounds: BodyBounds) -> None:
    """Raises PayloadTooLarge, or UnsupportedMediaType for a compressed body, by the headers."""
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaType("Content-Encoding is not supported; send the body uncompressed.")
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > bounds.max_bytes:
        raise bounds.too_large()


async def read(receive: Receive, limits: Limits, arriving: ArrivingBodies) -> bytearray:
    """The whole body, its size checked as it arrives, whatever Content-Length says.

    Raises PayloadTooLarge, RequestTimeout, ClientGone, or QueueFull if `arriving` refuses it.
    """
    body = bytearray()

    async def take(piece: bytes) -> None:
        body.extend(piece)

    await read_pieces(receive, take, bounds_of(limits), arriving)
    return body


async def read_pieces(
    receive: Receive,
    take: Callable[[bytes], Awaitable[None]],
    bounds: BodyBounds,
    arriving: ArrivingBodies,
) -> None:
    """Pass the body to `take` as it arrives. Raises as `read`, and what `take` raises."""
    try:
        async with asyncio.timeout(bounds.seconds) as deadline:
            with arriving.arrival(deadline) as arrival:
                await _pass_on(receive, take, bounds, arriving, arrival)
    except TimeoutError:
        if arrival.is_refused:
            raise QueueFull(
                f"Too many large bodies are arriving ({bounds.arriving_setting}), and this one has "
                "taken longest; try again."
            ) from None
        raise RequestTimeout(
            f"The request's body did not arrive within {bounds.seconds:g} seconds "
            f"({bounds.time_setting})."
        ) from None


def discard(body: bytearray) -> None:
    """Free the memory of `body`, even if, say, a traceback still refers to it."""
    with contextlib.suppress(BufferError):  # still being parsed on a thread: it is small
        body.clear()


async def read_small(
    request: Request, limits: Limits, arriving: ArrivingBodies, *, any_type: bool = False
) -> dict[str, Any]:
    """The JSON object in a small body, parsed on the event loop. Raises RequestError."""
    check_headers(Headers(scope=request.scope), limits, any_type=any_type)
    data = await read(request.receive, limits, arriving)
    if not json_body.is_small(data):
        raise PayloadTooLarge("The request's body is too large for this route.")
    return json_body.parse_object(data)


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, T], goes_on: Callable[[], bool] = lambda: False
) -> T:
    """The result of `work`. If the client disconnects, cancels it, unless it `goes_on()` without.

    Raises ClientGone if it was cancelled. The request's body must have been read. On return `work`
    has ended, clean-up included.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done() and goes_on():
            await asyncio.wait((working,))
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.gather(watching, working, return_exceptions=True)
    if working.cancelled():
        raise ClientGone
    return working.result()


async def _pass_on(
    receive: Receive,
    take: Callable[[bytes], Awaitable[None]],
    bounds: BodyBounds,
    arriving: ArrivingBodies,
    arrival: Arrival,
) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        arriving.add(arrival, len(piece))
        if arrival.num_bytes > bounds.max_bytes:
            raise bounds.too_large()
        await take(piece)
        if not message.get("more_body", False):
            return


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
