"""A deadline that moves often and is rarely met."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls `on_due` once the time set has come.

    Moving it is cheap: the timer is left alone, and set anew when it fires too early.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_due: Callable[[], None]) -> None:
        self._loop = loop
        self._on_due = on_due
        self._due: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Due in `seconds` from now, whatever was set before."""
        self._due = self._loop.time() + seconds
        if self._timer is not None and self._timer.when() > self._due:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._due, self._fire)

    def clear(self) -> None:
        """Never due, until it is set again."""
        self._due = None

    def cancel(self) -> None:
        """As `clear`, and nothing refers to `on_due` any more."""
        self._due = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        if self._due is None:
            return
        if self._due > self._loop.time():
            self._timer = self._loop.call_at(self._due, self._fire)
            return
        self._due = None
        self._on_due()
