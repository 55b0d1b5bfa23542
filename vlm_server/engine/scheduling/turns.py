"""The order in which requests of several clients are served: the clients take turns.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), with the number of sequences as the cost.
"""

from __future__ import annotations

from collections.abc import Iterable

from vlm_server.engine.request.request import Request


class Turns:
    """Gives each request its place among those that wait: the lower its turn, the earlier.

    A client's own requests keep their order, each one turn per sequence after the one before. A
    client that had nothing waiting comes in with whoever is next. So one that sends many waits
    behind one that sends few, and with one client the order is that of arrival.
    """

    def __init__(self) -> None:
        self._now = 0
        """The turn of whoever is next."""
        self._next: dict[str, int] = {}
        """The turn after the last one of each client, where that lies ahead."""

    def take(self, client: str, num_seqs: int, tracked: Iterable[Request]) -> int:
        """The turn of a request that comes now, beside those that are `tracked`."""
        waiting = [one.turn for one in tracked if not one.has_left_queue]
        self._now = min(waiting, default=max([self._now, *self._next.values()]))
        self._next = {one: turn for one, turn in self._next.items() if turn > self._now}
        turn = self._next.get(client, self._now)
        self._next[client] = turn + num_seqs
        return turn
