"""Values by key, bounded in bytes. Knows pins and who was used last; knows no value."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from vlm_server.protocol import CacheStats

V = TypeVar("V")


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    size_bytes: int
    pins: int = 0


class Lease(Generic[V]):
    """A value that is not evicted until it is released. Releasing twice is no error."""

    def __init__(self, cache: LruCache[V], value: V, entry: _Entry[V] | None) -> None:
        """`entry` is None for a value that is not kept."""
        self._cache = cache
        self._entry = entry
        self.value = value

    def release(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._cache._unpin(entry)


class LruCache(Generic[V]):
    """Evicts what was used longest ago and is not leased. Thread-safe."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        self._name = name
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry[V]] = OrderedDict()
        """The one used longest ago comes first."""
        self._size_bytes = self._pinned_bytes = 0
        self._hits = self._misses = self._evictions = 0

    def lease(self, key: str) -> Lease[V] | None:
        """The value of `key`, pinned; None if it is not here."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._misses += 1
                return None
            self._hits += 1
            return self._lease(key, entry)

    def get(self, key: str) -> V | None:
        """The value of `key`; None if it is not here."""
        lease = self.lease(key)
        if lease is None:
            return None
        lease.release()
        return lease.value

    def __contains__(self, key: str) -> bool:
        """Whether `key` is here; counts as no use of it."""
        with self._lock:
            return key in self._entries

    def put(self, key: str, value: V, size_bytes: int) -> Lease[V]:
        """Keep `value`, if there is room that can be made; what is here under `key` stays.

        The lease is of what is here, or else of `value`, which is not kept.
        """
        with self._lock:
            if key not in self._entries:
                if size_bytes > self._limit_bytes - self._pinned_bytes:
                    return Lease(self, value, None)
                self._make_room(size_bytes)
                self._entries[key] = _Entry(value, size_bytes)
                self._size_bytes += size_bytes
            return self._lease(key, self._entries[key])

    @property
    def evictable_bytes(self) -> int:
        with self._lock:
            return self._size_bytes - self._pinned_bytes

    def evict(self, num_bytes: int) -> int:
        """Drop so much, if that is not leased; returns what went."""
        with self._lock:
            before = self._size_bytes
            self._make_room(num_bytes + self._limit_bytes - before)
            return before - self._size_bytes

    def clear(self) -> None:
        """Drop what is not leased, and count from zero."""
        with self._lock:
            self._make_room(self._limit_bytes)
            self._hits = self._misses = self._evictions = 0

    def read(self) -> CacheStats:
        with self._lock:
            return CacheStats(
                name=self._name,
                entries=len(self._entries),
                size_bytes=self._size_bytes,
                pinned_bytes=self._pinned_bytes,
                limit_bytes=self._limit_bytes,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
            )

    def check_integrity(self) -> None:
        """Raises AssertionError if the sums are not those of the entries, or over the limit."""
        with self._lock:
            entries = self._entries.values()
            assert self._size_bytes == sum(entry.size_bytes for entry in entries)
            assert self._pinned_bytes == sum(e.size_bytes for e in entries if e.pins)
            assert all(entry.pins >= 0 for entry in entries)
            assert self._size_bytes <= self._limit_bytes

    def _make_room(self, size_bytes: int) -> None:
        free = [key for key, entry in self._entries.items() if not entry.pins]
        for key in free:
            if self._size_bytes + size_bytes <= self._limit_bytes:
                return
            self._size_bytes -= self._entries.pop(key).size_bytes
            self._evictions += 1

    def _lease(self, key: str, entry: _Entry[V]) -> Lease[V]:
        self._entries.move_to_end(key)
        if not entry.pins:
            self._pinned_bytes += entry.size_bytes
        entry.pins += 1
        return Lease(self, entry.value, entry)

    def _unpin(self, entry: _Entry[V]) -> None:
        with self._lock:
            entry.pins -= 1
            if not entry.pins:
                self._pinned_bytes -= entry.size_bytes
