"""How many requests of each API key are in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from vlm_server.api.http.access.keys import ApiKey
from vlm_server.errors import KeyLimitReached


class KeySlots:
    """Counts by the keys' names. Used from the event loop only, so it needs no lock."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()

    @contextmanager
    def take(self, key: ApiKey | None) -> Iterator[None]:
        """Hold a slot of `key` for the `with` block. Raises KeyLimitReached if all are taken."""
        if key is None:
            yield
            return
        if key.max_requests is not None and self.taken[key.name] >= key.max_requests:
            raise KeyLimitReached(
                f"{key.max_requests} requests with this API key are in flight, as many as it may."
            )
        self.taken[key.name] += 1
        try:
            yield
        finally:
            self.taken[key.name] -= 1
            if not self.taken[key.name]:
                del self.taken[key.name]
