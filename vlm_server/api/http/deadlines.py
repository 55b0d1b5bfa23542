"""The deadlines of a request in the front: what its client asks for, and who watches them.

The engine ends a request that misses one (`Scheduler.expire`). The front does so itself before the
engine has the request, and a moment later for an engine that does not react.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager

import msgspec

from vlm_server import settings
from vlm_server.deadlines import RequestDeadlines
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import Deadlines, Tokens, Working
from vlm_server.supervisor.client import RequestEvent

HEADERS = {
    "queue_seconds": "X-Queue-Timeout-Ms",
    "first_token_seconds": "X-First-Token-Timeout-Ms",
    "token_seconds": "X-Token-Timeout-Ms",
    "total_seconds": "X-Request-Timeout-Ms",
}
"""By setting, the header that asks for less."""

_MAX_DIGITS = 12
_GRACE_SECONDS = 1.0
"""How long the engine has to end a request that missed a deadline."""
_STOPPED_SECONDS = 1.0
"""A timer that is later than this fires in a process that was stopped or had no processor."""


class RequestClock:
    """The deadlines of one request, which begin now: when its headers have come."""

    def __init__(self, headers: Mapping[str, str], limits: settings.Deadlines) -> None:
        """Raises InvalidRequest for a header that is no number of milliseconds."""
        wanted = {name: _read(headers, name, getattr(limits, name)) for name in HEADERS}
        self._deadlines = RequestDeadlines(msgspec.convert(wanted, Deadlines), time.monotonic())

    def left(self) -> Deadlines:
        """What the engine may still take."""
        return self._deadlines.left(time.monotonic())

    @asynccontextmanager
    async def before_submit(self) -> AsyncIterator[None]:
        """Ends what is done before the engine has the request, with the error of its deadline."""
        try:
            async with asyncio.timeout_at(self._deadlines.next_at) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            self._check()

    async def watch(
        self, events: AsyncGenerator[RequestEvent, None], on_begin: Callable[[], None]
    ) -> AsyncGenerator[RequestEvent, None]:
        """The engine's `events`; `on_begin` is called once the device begins with the request.

        Raises the error of a deadline that passed and that the engine did not react to.
        """
        async with aclosing(events):
            while (event := await self._next(events)) is not None:
                if isinstance(event, Working):
                    self._deadlines.begin()
                    on_begin()
                elif isinstance(event, Tokens):
                    self._deadlines.take_token(time.monotonic())
                    on_begin()
                yield event

    async def _next(self, events: AsyncGenerator[RequestEvent, None]) -> RequestEvent | None:
        try:
            async with asyncio.timeout(None) as timeout:
                timer = _Timer(timeout, self._deadlines.next_at + _GRACE_SECONDS)
                try:
                    return await anext(events, None)
                finally:
                    timer.stop()
        except TimeoutError:
            if not timeout.expired():
                raise
            self._check()
            raise

    def _check(self) -> None:
        if error := self._deadlines.passed(time.monotonic()):
            raise error from None


class _Timer:
    """Lets `timeout` expire at a time of the loop's clock, in a process that runs.

    One that was stopped meanwhile hears first what the engine has said.
    """

    def __init__(self, timeout: asyncio.Timeout, at: float) -> None:
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._start(at)

    def stop(self) -> None:
        self._handle.cancel()

    def _start(self, at: float) -> None:
        self._handle = self._loop.call_at(at, self._expire, at)

    def _expire(self, at: float) -> None:
        now = self._loop.time()
        if now - at > _STOPPED_SECONDS:
            self._start(now + _GRACE_SECONDS)
        else:
            self._timeout.reschedule(now)


def _read(headers: Mapping[str, str], name: str, limit: float) -> float | None:
    """The seconds of the deadline `name`: those in its header, `limit` at most."""
    limit_seconds = limit or None
    value = headers.get(HEADERS[name])
    if value is None:
        return limit_seconds
    if not (value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS and int(value)):
        raise InvalidRequest(
            f"`{HEADERS[name]}` must be whole milliseconds, from 1.", HEADERS[name]
        )
    seconds = int(value) / 1000
    return seconds if limit_seconds is None else min(seconds, limit_seconds)
