"""How fast requests end, as measured; from that, when it is worth to try again."""

from __future__ import annotations

from collections import deque

_WINDOW_SECONDS = 60.0
_MAX_ENDS = 256
_MIN_ENDS = 4
"""Fewer say nothing about a rate."""
MIN_SECONDS, MAX_SECONDS = 1.0, 60.0


class ServiceRate:
    """The rate at which requests ended lately. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_MAX_ENDS)
        self._busy_since = 0.0

    def begin(self, now: float) -> None:
        """The first request came, after none was there."""
        self._busy_since = now

    def end(self, now: float) -> None:
        """A request ended."""
        self._ends.append(now)

    def seconds_for(self, num_requests: int, now: float) -> float:
        """How long the `num_requests` that are there take at this rate, within 1 to 60 seconds.

        Where too few have ended, they are expected to take as long again as until now.
        """
        if not num_requests:
            return MIN_SECONDS
        since = max(self._busy_since, now - _WINDOW_SECONDS)
        if len(self._ends) == _MAX_ENDS:
            since = max(since, self._ends[0])
        num_ends = sum(at >= since for at in self._ends)
        seconds = now - since
        if num_ends >= _MIN_ENDS:
            seconds *= num_requests / num_ends
        return min(max(seconds, MIN_SECONDS), MAX_SECONDS)
