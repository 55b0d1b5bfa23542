"""Fairness between API keys where one thing is shared: their turns, their order, and their room.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), as in the engine's queue.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager


def room_of(owner: str, sizes: Mapping[str, int], limit: int) -> int:
    """What `owner` may have of `limit`: an equal share, or what other owners leave.

    sizes: what each owner with some has.
    """
    others = [size for other, size in sizes.items() if other != owner]
    return max(limit // (1 + len(others)), limit - sum(others))


class FairOrder:
    """The owner with the least `place` is next.

    An owner's place grows by what its turns cost. One that comes, or comes back, begins at the
    place of the owner served last: it is neither behind others nor far ahead of them.
    """

    def __init__(self) -> None:
        self._now = 0.0
        """The place of the owner served last; never decreases."""
        self._places: dict[str, float] = {}
        """Places of owners, if later than that."""

    def place(self, owner: str) -> float:
        return self._places.get(owner, self._now)

    def begin(self, owner: str) -> None:
        """`owner` is served."""
        self._now = max(self._now, self.place(owner))
        self._places = {each: at for each, at in self._places.items() if at > self._now}

    def charge(self, owner: str, cost: float) -> None:
        """What a turn of `owner` cost."""
        self._places[owner] = self.place(owner) + cost


class FairTurns:
    """At most `limit` turns at a time, of an owner at most `owner_limit`; the cost is their time.

    The next turn is that of the owner with the fewest running, then of the first in `FairOrder`;
    those of one owner are in the order of arrival. Use from one event loop.
    """

    def __init__(self, limit: int, owner_limit: int | None = None) -> None:
        self._limit = limit
        self._owner_limit = limit if owner_limit is None else owner_limit
        self._order = FairOrder()
        self._running = Counter[str]()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """The `with` block is a turn of `owner`."""
        loop = asyncio.get_running_loop()
        turn, began_at = loop.create_future(), 0.0
        self._waiting.append((owner, turn))
        self._begin_next()
        try:
            await turn
            began_at = loop.time()
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._running -= Counter([owner])
                self._order.charge(owner, loop.time() - began_at if began_at else 0.0)
            self._waiting = [entry for entry in self._waiting if entry[1] is not turn]
            self._begin_next()

    def _begin_next(self) -> None:
        while self._running.total() < self._limit:
            ready = [
                (owner, turn)
                for owner, turn in self._waiting
                if not turn.done()  # cancelled, and not yet removed
                if self._running[owner] < self._owner_limit
            ]
            if not ready:
                return
            owner, turn = min(ready, key=self._place)
            self._waiting.remove((owner, turn))
            self._running[owner] += 1
            self._order.begin(owner)
            turn.set_result(None)

    def _place(self, entry: tuple[str, asyncio.Future[None]]) -> tuple[int, float]:
        return self._running[entry[0]], self._order.place(entry[0])
