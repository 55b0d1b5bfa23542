"""An amount that several clients share: a client may have all of it until another wants some."""

from __future__ import annotations

from collections import Counter


class FairShare:
    """At most `limit`, taken and given back by clients.

    Each client that holds some, or was refused lately, has the same share. It may take more only if
    what the others were refused stays free, up to their shares: nothing is kept for who wants
    nothing. Used from the event loop only, so it needs no lock; times are seconds of one monotonic
    clock.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._held: Counter[str] = Counter()
        self._wants: dict[str, tuple[float, int]] = {}
        """What each client was refused, and until when that is kept for it."""

    def has_room(self, client: str, amount: int, now: float) -> bool:
        """Whether `client` may take `amount` now."""
        self._wants = {one: want for one, want in self._wants.items() if want[0] > now}
        free = self.limit - self.taken
        if amount > free:
            return False
        others = (self._wants.keys() | self._held.keys()) - {client}
        share = max(1, self.limit // (1 + len(others)))
        held = self._held[client]
        if not held or held + amount <= share:
            return True
        return amount <= free - sum(self._kept_for(other, share) for other in others)

    def want(self, client: str, amount: int, until: float) -> None:
        """`client` was refused `amount`: until then it is kept free, within its share."""
        self._wants[client] = until, amount

    def _kept_for(self, client: str, share: int) -> int:
        _, amount = self._wants.get(client, (0.0, 0))
        return min(amount, max(0, share - self._held[client]))

    def take(self, client: str, amount: int) -> None:
        """`client` holds `amount` more."""
        self.taken += amount
        self._held[client] += amount

    def give_back(self, client: str, amount: int) -> None:
        self.taken -= amount
        self._held[client] -= amount
        if not self._held[client]:
            del self._held[client]
