"""What all caches hold together. Knows readings; knows no entry."""

from __future__ import annotations

from typing import Protocol

from vlm_server.protocol import CacheStats


class Cache(Protocol):
    """What the ledger asks of each cache; from any thread."""

    def read(self) -> CacheStats: ...

    def clear(self) -> None:
        """Drop what is not in use, but for what outlives the process; count from zero."""
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError if what it counts is not what it holds."""
        ...


class Ledger:
    """The caches of one engine."""

    def __init__(self, *caches: Cache) -> None:
        self._caches = caches

    def read(self) -> tuple[CacheStats, ...]:
        return tuple(cache.read() for cache in self._caches)

    def clear(self) -> None:
        for cache in self._caches:
            cache.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError, see `Cache.check_integrity`."""
        for cache in self._caches:
            cache.check_integrity()
