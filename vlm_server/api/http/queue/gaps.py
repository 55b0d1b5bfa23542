"""The gaps between interactive requests, in which lines of batches run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.types import Scope

_LINE_KEY = "vlm_server.batch_line"


def mark_line(scope: Scope) -> None:
    """Make the request of `scope` a line of a batch. No client can set this key."""
    scope[_LINE_KEY] = True


def is_line(scope: Scope) -> bool:
    return _LINE_KEY in scope


class Gaps:
    """Knows when no interactive request is in flight. Used from the event loop only."""

    def __init__(self, idle_seconds: float) -> None:
        self.on_close: Callable[[], None] = lambda: None
        """Called when an interactive request arrives."""
        self._quiet_seconds = idle_seconds
        self._num_requests = 0
        self._since = float("-inf")
        """The end of the last interactive request."""

    @property
    def seconds_until_open(self) -> float | None:
        """0 in a gap; None while an interactive request is in flight."""
        if self._num_requests:
            return None
        return max(0.0, self._since + self._quiet_seconds - time.monotonic())

    @contextmanager
    def request(self, scope: Scope) -> Iterator[None]:
        """A request in flight, for the `with` block: interactive, unless it is a line."""
        if is_line(scope):
            yield
            return
        self._num_requests += 1
        self.on_close()
        try:
            yield
        finally:
            self._num_requests -= 1
            self._since = time.monotonic()
