"""Queue slots: how many requests may be in flight at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vlm_server.errors import QueueFull


class QueueSlots:
    """At most `limit` holders at a time. Used from the event loop only, so it needs no lock."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0

    def check(self) -> None:
        """Raises QueueFull if all are taken now."""
        if self.taken >= self.limit:
            raise QueueFull(f"{self.limit} requests are in flight; try again in a moment.")

    @contextmanager
    def take(self) -> Iterator[None]:
        """Hold a slot for the `with` block. Raises QueueFull if all are taken."""
        self.check()
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1
