"""The deadlines of one request: in the front from its arrival, in the engine from its submission.

Knows durations on a monotonic clock, and no time of day: a clock that is set changes nothing.
"""

from __future__ import annotations

import math

from vlm_server.errors import (
    FirstTokenTimeout,
    QueueTimeout,
    RequestError,
    TokenTimeout,
    TotalTimeout,
)
from vlm_server.protocol import Deadlines

_ERRORS = (
    (
        QueueTimeout,
        "The request's turn did not come before its deadline (deadlines.queue_timeout_seconds).",
    ),
    (
        FirstTokenTimeout,
        "The answer did not begin before the request's deadline "
        "(deadlines.first_token_timeout_seconds).",
    ),
    (
        TokenTimeout,
        "The answer paused for longer than the request's deadline allows "
        "(deadlines.token_timeout_seconds).",
    ),
    (
        TotalTimeout,
        "The answer did not end before the request's deadline (deadlines.total_timeout_seconds).",
    ),
)


class RequestDeadlines:
    """The deadlines of one request that still lie ahead of it.

    All times are seconds of one monotonic clock. The deadline that passes first names the error.
    """

    def __init__(self, limits: Deadlines, now: float) -> None:
        """`limits` begin `now`."""
        self._queue_at = _at(now, limits.queue_timeout_seconds)
        self._first_token_at = _at(now, limits.first_token_timeout_seconds)
        self._total_at = _at(now, limits.total_timeout_seconds)
        self._token_seconds = limits.token_timeout_seconds
        self._token_at = math.inf

    @property
    def next_at(self) -> float:
        """The time of the next deadline; infinity if there is none."""
        return min(self._queue_at, self._first_token_at, self._token_at, self._total_at)

    def remaining(self, now: float) -> Deadlines:
        """The remaining deadlines, in seconds from `now`."""
        return Deadlines(
            _remaining(now, self._queue_at),
            _remaining(now, self._first_token_at),
            self._token_seconds,
            _remaining(now, self._total_at),
        )

    def begin(self) -> None:
        """End the queue deadline: the device begins with the request."""
        self._queue_at = math.inf

    def record_token(self, now: float) -> None:
        """Record a token; from the first one on, the time to the next counts."""
        self._queue_at = self._first_token_at = math.inf
        self._token_at = _at(now, self._token_seconds)

    def error_at(self, now: float) -> RequestError | None:
        """The error for the first deadline that has passed; None if none has."""
        at = self.next_at
        if now < at:
            return None
        times = (self._queue_at, self._first_token_at, self._token_at, self._total_at)
        kind, text = _ERRORS[times.index(at)]
        return kind(text)


def _at(now: float, seconds: float | None) -> float:
    return math.inf if seconds is None else now + seconds


def _remaining(now: float, at: float) -> float | None:
    return None if at == math.inf else max(0.0, at - now)
