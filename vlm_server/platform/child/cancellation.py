"""The cancellation of work on another thread, or in another process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Cancelled(Exception):
    """The work was cancelled."""


class Cancellation:
    """A flag that cancels work on another thread. Thread-safe."""

    def __init__(self) -> None:
        self._num_checks = 0
        self._is_bounded = False
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._callback: Callable[[], None] | None = None

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    def num_checks(self) -> int:
        """A heartbeat: it grows while the work makes progress, or is `bounded`."""
        return self._num_checks + (int(time.monotonic()) if self._is_bounded else 0)

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """A context for work that has a deadline of its own, and makes no checks."""
        self._is_bounded = True
        try:
            yield
        finally:
            self._is_bounded = False
            self._num_checks += 1

    def check(self) -> None:
        """Raises Cancelled if the work was cancelled. To be called between two parts of it."""
        self._num_checks += 1
        if self._is_cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """Run the callback, if there is one. Cancelling twice is no error."""
        with self._lock:
            self._is_cancelled = True
            callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    def on_cancel(self, callback: Callable[[], None] | None) -> None:
        """Run `callback` when cancelled, or now if already cancelled; replaces the last one."""
        with self._lock:
            self._callback = None if self._is_cancelled else callback
            is_due = self._is_cancelled and callback is not None
        if is_due and callback is not None:
            callback()
