"""Caches in memory, bounded in bytes, that evict the least recently used unpinned entries."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from vlm_server.protocol import CacheStats

K = TypeVar("K")
V = TypeVar("V")


class InspectableCache(Protocol):
    """The interface of every cache, in memory or on disk. Thread-safe."""

    def stats(self) -> CacheStats: ...


class Pinnable(Protocol):
    """An entry that is not evicted while it has pins."""

    @property
    def pins(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...


E = TypeVar("E", bound=Pinnable)


class BoundedEntries(Generic[K, E]):
    """Entries bounded in bytes; `order` has the least recently used first. Not thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = self.pinned_bytes = self.num_evictions = 0
        self.order: OrderedDict[K, E] = OrderedDict()

    def __len__(self) -> int:
        return len(self.order)

    def evict(self, num_bytes: int) -> int:
        """Evict entries of `num_bytes` or more, as far as unpinned; returns the number of bytes."""
        victims, freed = list[K](), 0
        for key, entry in self.order.items():  # stops early: this runs at each insertion
            if freed >= num_bytes:
                break
            if not entry.pins:
                victims.append(key)
                freed += entry.size_bytes
        for key in victims:
            self.remove(key)
        self.num_evictions += len(victims)
        return freed

    def remove(self, key: K) -> None:
        """Remove an unpinned entry."""
        self.size_bytes -= self.order.pop(key).size_bytes


class MemoryCache:
    """A cache in memory: its lock, its limit and its counters. Thread-safe."""

    def __init__(self, name: str, entries: BoundedEntries[Any, Any]) -> None:
        self._name = name
        self._bounded = entries
        self._lock = threading.Lock()
        self._hits = self._misses = self._num_references = 0

    @property
    def limit_bytes(self) -> int:
        return self._bounded.limit_bytes

    @property
    def evictable_bytes(self) -> int:
        with self._lock:
            return self._bounded.size_bytes - self._bounded.pinned_bytes

    @property
    def num_references(self) -> int:
        """Number of unreleased leases and matches, and of insertions under way."""
        with self._lock:
            return self._num_references

    def evict(self, num_bytes: int) -> int:
        """Evict entries of `num_bytes` or more, as far as unpinned; returns the number of bytes."""
        with self._lock:
            return self._bounded.evict(num_bytes)

    def resize(self, limit_bytes: int) -> None:
        """Set the limit; pinned entries above it are evicted once they are released."""
        with self._lock:
            self._bounded.limit_bytes = limit_bytes
            self._keep_limit()

    def clear(self) -> None:
        """Drop unpinned entries, and reset the counters."""
        with self._lock:
            self._bounded.evict(self._bounded.size_bytes + 1)
            self._hits = self._misses = self._bounded.num_evictions = 0

    def stats(self) -> CacheStats:
        with self._lock:
            return CacheStats(
                name=self._name,
                entries=len(self._bounded),
                size_bytes=self._bounded.size_bytes,
                pinned_bytes=self._bounded.pinned_bytes,
                limit_bytes=self._bounded.limit_bytes,
                hits=self._hits,
                misses=self._misses,
                evictions=self._bounded.num_evictions,
            )

    def _keep_limit(self) -> None:
        """Evict down to the limit, which may have been lowered while entries were pinned."""
        self._bounded.evict(self._bounded.size_bytes - self._bounded.limit_bytes)


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


class LruCache(MemoryCache, Generic[V]):
    """A cache of values by key. Thread-safe."""

    def __init__(self, name: str, limit_bytes: int) -> None:
        self._entries = entries = BoundedEntries[str, _Entry[V]](limit_bytes)
        super().__init__(name, entries)

    def lease(self, key: str) -> Lease[V] | None:
        """The value of `key`, pinned; None if it is not stored."""
        with self._lock:
            entry = self._entries.order.get(key)
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
        """Whether `key` is stored; does not count as a use."""
        with self._lock:
            return key in self._entries.order

    def put(self, key: str, value: V, size_bytes: int) -> Lease[V]:
        """Store `value` if there is room, unless `key` has a value already.

        Returns a lease on the stored value, or on `value` if it is not stored.
        """
        with self._lock:
            entries = self._entries
            if key not in entries.order:
                if size_bytes > entries.limit_bytes - entries.pinned_bytes:
                    self._num_references += 1
                    return Lease(self, value, None)
                entries.evict(entries.size_bytes + size_bytes - entries.limit_bytes)
                entries.order[key] = _Entry(value, size_bytes)
                entries.size_bytes += size_bytes
            return self._lease(key, entries.order[key])

    def discard(self, key: str) -> None:
        """Drop the value of `key`, unless it is leased."""
        with self._lock:
            entry = self._entries.order.get(key)
            if entry is not None and not entry.pins:
                self._entries.remove(key)

    def _lease(self, key: str, entry: _Entry[V]) -> Lease[V]:
        self._entries.order.move_to_end(key)
        if not entry.pins:
            self._entries.pinned_bytes += entry.size_bytes
        entry.pins += 1
        self._num_references += 1
        return Lease(self, entry.value, entry)

    def _release(self, lease: Lease[V]) -> None:
        with self._lock:
            if lease._is_released:
                raise RuntimeError("a lease was released twice")
            lease._is_released = True
            self._num_references -= 1
            entry = lease._entry
            if entry is None:
                return
            entry.pins -= 1
            if not entry.pins:
                self._entries.pinned_bytes -= entry.size_bytes
                self._keep_limit()
