"""A cache of values by key, bounded in bytes: least recently used first out, leases pinned."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from vlm_server.protocol import CacheStats

V = TypeVar("V")


class Cache(Protocol):
    """The interface of every cache, in memory or on disk. Thread-safe."""

    def read(self) -> CacheStats: ...

    def check_integrity(self) -> None:
        """Raises AssertionError if counters and entries disagree."""
        ...


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    size_bytes: int
    pins: int = 0


class Lease(Generic[V]):
    """A pinned value, until it is released, once."""

    def __init__(self, cache: LruCache[V], value: V, entry: _Entry[V] | None) -> None:
        """`entry` is None for a value that is not stored."""
        self._cache = cache
        self._entry = entry
        self._is_released = False
        self.value = value

    def release(self) -> None:
        """Raises RuntimeError if it was released before."""
        self._cache._release(self)


class LruCache(Generic[V]):
    """A cache that evicts the least recently used entry without a lease. Thread-safe."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        self._name = name
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry[V]] = OrderedDict()
        """Least recently used first."""
        self._size_bytes = self._pinned_bytes = 0
        self._hits = self._misses = self._evictions = self._num_holds = 0

    def lease(self, key: str) -> Lease[V] | None:
        """The value of `key`, pinned; None if it is not stored."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._misses += 1
                return None
            self._hits += 1
            return self._lease(key, entry)

    def get(self, key: str) -> V | None:
        """The value of `key`; None if it is not stored."""
        lease = self.lease(key)
        if lease is None:
            return None
        lease.release()
        return lease.value

    def __contains__(self, key: str) -> bool:
        """Whether `key` is stored; no use of it."""
        with self._lock:
            return key in self._entries

    def put(self, key: str, value: V, size_bytes: int) -> Lease[V]:
        """Store `value`, if room can be made; a value that `key` has already stays.

        The lease holds the stored value, or `value` alone if there is no room for it.
        """
        with self._lock:
            if key not in self._entries:
                if size_bytes > self._limit_bytes - self._pinned_bytes:
                    self._num_holds += 1
                    return Lease(self, value, None)
                self._make_room(size_bytes)
                self._entries[key] = _Entry(value, size_bytes)
                self._size_bytes += size_bytes
            return self._lease(key, self._entries[key])

    def discard(self, key: str) -> None:
        """Drop the value of `key`, unless it is leased."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and not entry.pins:
                self._size_bytes -= self._entries.pop(key).size_bytes

    @property
    def evictable_bytes(self) -> int:
        with self._lock:
            return self._size_bytes - self._pinned_bytes

    @property
    def num_references(self) -> int:
        """Number of leases that were not released."""
        with self._lock:
            return self._num_holds

    def evict(self, num_bytes: int) -> int:
        """Evict `num_bytes` of entries without a lease, if there are so many; returns the bytes."""
        with self._lock:
            before = self._size_bytes
            self._make_room(num_bytes + self._limit_bytes - before)
            return before - self._size_bytes

    def resize(self, limit_bytes: int) -> None:
        """Set the limit; leased entries above it go when they are released."""
        with self._lock:
            self._limit_bytes = limit_bytes
            self._make_room(0)

    def clear(self) -> None:
        """Drop entries without a lease, and reset the counters."""
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
        """Raises AssertionError if sums, entries, leases and limit disagree."""
        with self._lock:
            entries = self._entries.values()
            assert self._size_bytes == sum(entry.size_bytes for entry in entries)
            assert self._pinned_bytes == sum(e.size_bytes for e in entries if e.pins)
            assert all(entry.pins >= 0 for entry in entries)
            assert sum(entry.pins for entry in entries) <= self._num_holds
            assert self._size_bytes <= max(self._limit_bytes, self._pinned_bytes)

    def _make_room(self, size_bytes: int) -> None:
        victims, excess = list[str](), self._size_bytes + size_bytes - self._limit_bytes
        for key, entry in self._entries.items():
            if excess <= 0:
                break
            if not entry.pins:
                victims.append(key)
                excess -= entry.size_bytes
        for key in victims:
            self._size_bytes -= self._entries.pop(key).size_bytes
        self._evictions += len(victims)

    def _lease(self, key: str, entry: _Entry[V]) -> Lease[V]:
        self._entries.move_to_end(key)
        if not entry.pins:
            self._pinned_bytes += entry.size_bytes
        entry.pins += 1
        self._num_holds += 1
        return Lease(self, entry.value, entry)

    def _release(self, lease: Lease[V]) -> None:
        with self._lock:
            if lease._is_released:
                raise RuntimeError("a lease was released twice")
            lease._is_released = True
            self._num_holds -= 1
            entry = lease._entry
            if entry is None:
                return
            entry.pins -= 1
            if not entry.pins:
                self._pinned_bytes -= entry.size_bytes
                self._make_room(0)  # the limit may have been lowered meanwhile
