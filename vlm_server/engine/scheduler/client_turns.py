"""Whose request a preparer thread takes next: theirs who kept threads for the shortest time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class _Share:
    """What a client has had of the threads. begun: since when it has those that it has now."""

    seconds: float
    begun: dict[str, float] = field(default_factory=dict)
    is_turn_of_cheapest: bool = False


class ClientTurns:
    """Gives clients turns by time, since nobody knows how long a request will take.

    So one whose schemas take seconds waits for one whose schemas do not, which waits for those at
    most that have a thread already. A client that had nothing comes in with whoever was last.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: in seconds, never backwards."""
        self._clock = clock
        self._shares: dict[str, _Share] = {}
        self._now = 0.0
        """What whoever was last had had until then; it never falls."""

    def wait(self, clients: Sequence[str]) -> None:
        """These wait, and no others. Whoever neither waits nor has a thread is forgotten."""
        waiting = dict.fromkeys(clients)
        self._shares = {
            client: share
            for client, share in self._shares.items()
            if share.begun or client in waiting
        }
        for client in waiting:
            self._shares.setdefault(client, _Share(self._now))

    def next(self, clients: Sequence[str]) -> str:
        """Whose turn it is of these, which wait; of several, the first."""
        return min(clients, key=self._seconds)

    def takes_cheapest(self, client: str) -> bool:
        """Whether it is the turn of the client's cheapest request, or else of its oldest."""
        share = self._shares[client]
        share.is_turn_of_cheapest = not share.is_turn_of_cheapest
        return not share.is_turn_of_cheapest

    def begin(self, request_id: str, client: str) -> None:
        """A thread takes a request of `client`, which waited."""
        self._now = max(self._now, self._seconds(client))
        self._shares[client].begun[request_id] = self._clock()

    def end(self, request_id: str, client: str) -> None:
        """The thread is done with it."""
        share = self._shares[client]
        share.seconds += self._clock() - share.begun.pop(request_id)

    def _seconds(self, client: str) -> float:
        share = self._shares[client]
        now = self._clock()
        return share.seconds + sum(now - since for since in share.begun.values())
