"""An amount that several clients share: a client may have all of it until another wants some."""

from __future__ import annotations

from collections import Counter

_WANTS_SECONDS = 10.0
"""How long a client counts as one that wants more, after it asked."""


class FairShare:
    """At most `limit`, taken and given back by clients.

    Each client that holds some, or asked lately, has the same share. It may take more only if what
    the others lack of theirs stays free. Used from the event loop only, so it needs no lock;
    times are seconds of one monotonic clock.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._held: Counter[str] = Counter()
        self._wants_until: dict[str, float] = {}

    def has_room(self, client: str, amount: int, now: float) -> bool:
        """Whether `client` may take `amount` now. It counts as one that wants some from now on."""
        self._forget(now)
        self.want(client, now + _WANTS_SECONDS)
        free = self.limit - self.taken
        if amount > free:
            return False
        others = (self._wants_until.keys() | self._held.keys()) - {client}
        share = max(1, self.limit // (1 + len(others)))
        held = self._held[client]
        if not held or held + amount <= share:
            return True
        return amount <= free - sum(max(0, share - self._held[other]) for other in others)

    def want(self, client: str, until: float) -> None:
        """`client` has its share kept free until then."""
        self._wants_until[client] = max(until, self._wants_until.get(client, until))

    def take(self, client: str, amount: int) -> None:
        """`client` holds `amount` more."""
        self.taken += amount
        self._held[client] += amount

    def give_back(self, client: str, amount: int) -> None:
        self.taken -= amount
        self._held[client] -= amount
        if not self._held[client]:
            del self._held[client]

    def _forget(self, now: float) -> None:
        self._wants_until = {one: at for one, at in self._wants_until.items() if at > now}
