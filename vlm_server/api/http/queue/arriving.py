"""Bodies that are still arriving: they hold no queue slot, and are bounded together in bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import contextmanager


class Arrival:
    """One body on its way. `deadline` is moved to now if it is refused."""

    def __init__(self, deadline: asyncio.Timeout) -> None:
        self.num_bytes = 0
        self.is_refused = False
        self._deadline = deadline
        self._since = asyncio.get_running_loop().time()

    def cost(self, now: float) -> float:
        """What it has taken so far, in bytes times seconds."""
        return self.num_bytes * (now - self._since)

    def refuse(self) -> None:
        """End the wait for the rest of it."""
        with contextlib.suppress(RuntimeError):  # its time is up just now
            self._deadline.reschedule(asyncio.get_running_loop().time())
            self.is_refused = True


class ArrivingBodies:
    """All bodies on their way; past `limit_bytes` the one that has cost most gives way.

    A body that is sent at once costs little even if it is large. Used from the event loop only.
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
        """So many more bytes of it are here."""
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
