"""The order in which requests of several clients are served.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), with the number of sequences as the cost.
"""

from __future__ import annotations

from collections.abc import Iterable

from vlm_server.engine.request.request import Request


class ClientQueue:
    """Gives each request its start tag: the lower, the earlier it is served.

    A client's own requests keep their order: each tag is that of the one before plus its number of
    sequences. A client that had nothing waiting comes in with whoever is next. So one that sends
    many waits for one that sends few, and with one client the order is that of arrival.
    """

    def __init__(self) -> None:
        self._now = 0
        """The start tag of whoever is next."""
        self._next: dict[str, int] = {}
        """What follows the last request of each client, where that lies ahead."""

    def start_tag(self, client: str, num_seqs: int, tracked: Iterable[Request]) -> int:
        """The tag of a request that comes now, beside those that are `tracked`."""
        waiting = [one.start_tag for one in tracked if not one.has_left_queue]
        self._now = min(waiting, default=max([self._now, *self._next.values()]))
        self._next = {one: tag for one, tag in self._next.items() if tag > self._now}
        start_tag = self._next.get(client, self._now)
        self._next[client] = start_tag + num_seqs
        return start_tag
