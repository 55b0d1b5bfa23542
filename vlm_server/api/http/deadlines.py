"""The deadlines of a request, and their enforcement in the front.

The engine enforces them itself (`Scheduler.expire`). The front does so before the engine has the
request, and a moment later for an engine that hangs.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Self

import msgspec

from vlm_server import settings
from vlm_server.api.http.connection.outgoing import Deadline
from vlm_server.deadlines import RequestDeadlines
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import Deadlines, OnDevice, Tokens
from vlm_server.supervisor.engine_process.client import RequestEvent

HEADERS = {
    "queue_timeout_seconds": "X-Queue-Timeout-Ms",
    "first_token_timeout_seconds": "X-First-Token-Timeout-Ms",
    "token_timeout_seconds": "X-Token-Timeout-Ms",
    "total_timeout_seconds": "X-Request-Timeout-Ms",
}
"""The header for a shorter deadline, by setting."""

_MAX_DIGITS = 12
_GRACE_SECONDS = 1.0
"""Time for the engine to end a request that missed a deadline."""
_STOPPED_SECONDS = 1.0
"""The delay of a timer that shows that the process was stopped."""


class RequestClock:
    """The deadlines of one request, counted from the arrival of its headers."""

    def __init__(self, headers: Mapping[str, str], limits: settings.DeadlineSettings) -> None:
        """Raises InvalidRequest for a header that is no number of milliseconds."""
        seconds_by_name = {name: _read(headers, name, getattr(limits, name)) for name in HEADERS}
        self._deadlines = RequestDeadlines(
            msgspec.convert(seconds_by_name, Deadlines), time.monotonic()
        )

    def remaining(self) -> Deadlines:
        """The time left for the engine."""
        return self._deadlines.remaining(time.monotonic())

    @asynccontextmanager
    async def before_submit(self) -> AsyncIterator[None]:
        """Bound the `with` block, before the engine has the request. Raises a deadline's error."""
        try:
            async with asyncio.timeout_at(self._deadlines.next_at) as timeout:
                yield
        except TimeoutError:
            if timeout.expired() and (error := self._deadlines.error_at(math.inf)):
                raise error from None
            raise

    async def watch(
        self, events: AsyncGenerator[RequestEvent, None], on_begin: Callable[[], None]
    ) -> AsyncGenerator[RequestEvent, None]:
        """The engine's `events`; `on_begin` is called once the device begins with the request.

        Raises the error of a deadline that the engine missed.
        """
        async with aclosing(events):
            with _Backstop(self._deadlines) as backstop:
                while (event := await backstop.wait_for(events)) is not None:
                    if isinstance(event, OnDevice):
                        self._deadlines.begin()
                        on_begin()
                    elif isinstance(event, Tokens):
                        self._deadlines.record_token(time.monotonic())
                        on_begin()
                    yield event


class _Backstop:
    """A timeout on the wait for events, for an engine that misses a deadline.

    After the process was stopped, events that have arrived are handled before the timeout counts.
    """

    def __init__(self, deadlines: RequestDeadlines) -> None:
        self._deadlines = deadlines
        self._loop = asyncio.get_running_loop()
        self._timeout: asyncio.Timeout | None = None
        """The timeout of the wait in progress."""
        self._timer = Deadline(self._loop, self._check)
        self._due = math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    async def wait_for(self, events: AsyncGenerator[RequestEvent, None]) -> RequestEvent | None:
        """The next event, None at the end. Raises the error of a deadline."""
        self._set(self._deadlines.next_at + _GRACE_SECONDS)
        try:
            async with asyncio.timeout(None) as self._timeout:
                return await anext(events, None)
        except TimeoutError:
            if error := self._deadlines.error_at(time.monotonic()):
                raise error from None
            raise
        finally:
            self._timeout = None

    def _set(self, due_at: float) -> None:
        self._due = due_at
        self._timer.set_at(due_at)

    def _check(self) -> None:
        now = self._loop.time()
        was_stopped = now - self._due > _STOPPED_SECONDS
        if was_stopped or self._timeout is None:  # None: the client reads slowly
            self._set(now + _GRACE_SECONDS)
        else:
            self._timeout.reschedule(now)


def _read(headers: Mapping[str, str], name: str, limit: float | None) -> float | None:
    """The seconds of the deadline `name`: those in its header, `limit` at most."""
    value = headers.get(HEADERS[name])
    if value is None:
        return limit
    if not (value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS and int(value)):
        raise InvalidRequest(
            f"`{HEADERS[name]}` must be whole milliseconds, from 1.", HEADERS[name]
        )
    seconds = int(value) / 1000
    return seconds if limit is None else min(seconds, limit)
