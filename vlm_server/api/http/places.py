"""The queue's places. Knows a number; knows nothing of requests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vlm_server.errors import QueueFull


class Places:
    """At most `limit` holders at a time. Used on the event loop alone, so it needs no lock."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0

    @contextmanager
    def take(self) -> Iterator[None]:
        """Holds one place for the block. Raises QueueFull if there is none."""
        if self.taken >= self.limit:
            raise QueueFull(f"{self.limit} requests are in flight; try again in a moment.")
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1
