"""Tests for every cache, to be inherited by the tests of each: `EveryCache`, and `HoldingCache`.

A cache takes part through a small adapter: its entries have numbers and, if nothing else is
said, 10 bytes; it has room for 30.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

import pytest

from vlm_server.protocol import CacheStats

ENTRY_BYTES, LIMIT_BYTES = 10, 30
NUM_THREADS = 4


class Adapter(Protocol):
    """A cache by numbers. Any method but `put` may be called from any thread at once."""

    def put(self, number: int, size_bytes: int = ENTRY_BYTES) -> None:
        """Store an entry, if there is room, and hold it no longer."""
        ...

    def get(self, number: int) -> bool:
        """Look an entry up and use it; whether it is stored."""
        ...

    @property
    def stored(self) -> set[int]:
        """The entries that are stored, of the numbers below 10. No use of them."""
        ...

    def evict(self, num_bytes: int) -> int: ...

    def stats(self) -> CacheStats: ...

    def check_integrity(self) -> None: ...


class Hold(Protocol):
    def release(self) -> None: ...


class HoldingAdapter(Adapter, Protocol):
    """A cache in memory: entries can be held."""

    def hold(self, number: int) -> Hold:
        """Look an entry up, whether it is stored or not."""
        ...

    @property
    def num_references(self) -> int: ...

    @property
    def evictable_bytes(self) -> int: ...

    def clear(self) -> None: ...


@contextmanager
def held(cache: HoldingAdapter, *numbers: int) -> Iterator[None]:
    holds = [cache.hold(number) for number in numbers]
    yield
    for hold in holds:
        hold.release()


def check(cache: Adapter) -> None:
    """The stats match the stored entries, within the limit."""
    cache.check_integrity()
    reading, stored = cache.stats(), cache.stored
    assert reading.entries == len(stored)
    assert reading.size_bytes == ENTRY_BYTES * len(stored) <= reading.limit_bytes == LIMIT_BYTES


class EveryCache:
    """Needs a fixture `cache`, an `Adapter` of an empty cache."""

    def test_new_cache_is_empty(self, cache: Adapter) -> None:
        check(cache)
        reading = cache.stats()
        assert (reading.entries, reading.pinned_bytes, cache.stored) == (0, 0, set())
        assert (reading.hits, reading.misses, reading.evictions, reading.damaged) == (0, 0, 0, 0)

    def test_every_cache_stays_within_its_limit(self, cache: Adapter) -> None:
        choice, evictions = random.Random(0), 0
        for _ in range(60):
            number, before = choice.randrange(10), cache.stored
            cache.put(number)
            evictions += len(before - cache.stored)
            assert number in cache.stored
            assert len(cache.stored) == min(3, len(before | {number}))
            assert cache.stats().evictions == evictions
            check(cache)

    def test_least_recently_used_entry_is_evicted_first(self, cache: Adapter) -> None:
        for number in (1, 2, 3):
            cache.put(number)
        assert cache.get(1)
        cache.put(4)
        assert cache.stored == {1, 3, 4}
        cache.put(5)
        assert cache.stored == {1, 4, 5}
        assert cache.stats().evictions == 2
        check(cache)

    def test_same_entry_is_stored_once(self, cache: Adapter) -> None:
        for _ in range(2):
            cache.put(1)
            assert cache.stats().entries == 1
            check(cache)
        assert cache.stats().evictions == 0

    def test_large_entry_evicts_several_small_ones(self, cache: Adapter) -> None:
        for number in (1, 2, 3):
            cache.put(number)
        cache.put(4, 2 * ENTRY_BYTES)
        assert cache.stored == {3, 4}
        cache.check_integrity()
        assert cache.stats().size_bytes == LIMIT_BYTES

    def test_entry_above_limit_evicts_nothing(self, cache: Adapter) -> None:
        cache.put(1)
        cache.put(2, LIMIT_BYTES + 1)
        assert (cache.stored, cache.stats().evictions) == ({1}, 0)
        check(cache)

    def test_entry_of_exactly_limit_is_stored(self, cache: Adapter) -> None:
        cache.put(1)
        cache.put(2, LIMIT_BYTES)
        assert cache.stored == {2}
        cache.check_integrity()

    def test_lookups_count_as_hits_and_misses(self, cache: Adapter) -> None:
        cache.put(1)
        assert [cache.get(number) for number in (1, 2, 1, 3, 1)] == [True, False, True, False, True]
        assert (cache.stats().hits, cache.stats().misses) == (3, 2)
        check(cache)

    def test_evict_returns_number_of_evicted_bytes(self, cache: Adapter) -> None:
        for number in (1, 2, 3):
            cache.put(number)
        assert cache.evict(0) == 0
        assert cache.evict(1) == ENTRY_BYTES
        assert cache.stored == {2, 3}
        check(cache)
        assert cache.evict(10 * LIMIT_BYTES) == 2 * ENTRY_BYTES
        assert cache.evict(1) == 0
        assert cache.stats().evictions == 3
        check(cache)

    @pytest.mark.usefixtures("eager_switches")
    def test_concurrent_put_get_and_evict_keep_integrity(self, cache: Adapter) -> None:
        def use(seed: int) -> int:
            choice = random.Random(seed)
            for _ in range(150):
                cache.put(choice.randrange(10))
                cache.get(choice.randrange(10))
                assert cache.stats().size_bytes <= LIMIT_BYTES
                if choice.random() < 0.1:
                    cache.evict(choice.randrange(LIMIT_BYTES))
                    cache.check_integrity()
            return 150

        with ThreadPoolExecutor(NUM_THREADS) as threads:
            lookups = sum(threads.map(use, range(NUM_THREADS)))
        check(cache)
        reading = cache.stats()
        assert (reading.pinned_bytes, reading.hits + reading.misses) == (0, lookups)


class HoldingCache(EveryCache):
    """Needs a fixture `cache`, a `HoldingAdapter` of an empty cache."""

    def test_held_entry_counts_as_pinned(self, cache: HoldingAdapter) -> None:
        cache.put(1)
        cache.put(2)
        with held(cache, 1, 1):
            assert cache.num_references == 2
            assert (cache.stats().pinned_bytes, cache.evictable_bytes) == (ENTRY_BYTES, ENTRY_BYTES)
            check(cache)
        assert cache.num_references == cache.stats().pinned_bytes == 0
        assert cache.evictable_bytes == 2 * ENTRY_BYTES

    def test_held_entry_survives_put_evict_and_clear(self, cache: HoldingAdapter) -> None:
        for number in (1, 2, 3):
            cache.put(number)
        with held(cache, 1):
            for number in (4, 5, 6, 7):
                cache.put(number)
            assert cache.stored == {1, 6, 7}
            assert cache.evict(LIMIT_BYTES) == 2 * ENTRY_BYTES
            cache.put(8)
            cache.clear()
            assert cache.stored == {1}
            check(cache)
        assert cache.evict(LIMIT_BYTES) == ENTRY_BYTES

    def test_entry_without_room_next_to_held_ones_evicts_nothing(
        self, cache: HoldingAdapter
    ) -> None:
        for number in (1, 2, 3):
            cache.put(number)
        with held(cache, 2, 3):
            cache.put(4, 2 * ENTRY_BYTES)
            assert (cache.stored, cache.stats().evictions) == ({1, 2, 3}, 0)
        with held(cache, 1, 2, 3):
            cache.put(4)
            assert (cache.stored, cache.stats().evictions) == ({1, 2, 3}, 0)
        check(cache)

    def test_second_release_of_hold_raises(self, cache: HoldingAdapter) -> None:
        cache.put(1)
        one, other = cache.hold(1), cache.hold(1)
        one.release()
        with pytest.raises(RuntimeError, match="released twice"):
            one.release()
        assert (cache.num_references, cache.stats().pinned_bytes) == (1, ENTRY_BYTES)
        other.release()
        check(cache)

    def test_hold_of_missing_entry_counts_as_reference(self, cache: HoldingAdapter) -> None:
        hold = cache.hold(1)
        assert (cache.num_references, cache.stats().pinned_bytes) == (1, 0)
        hold.release()
        assert cache.num_references == 0
        with pytest.raises(RuntimeError, match="released twice"):
            hold.release()

    def test_clear_removes_entries_and_counts(self, cache: HoldingAdapter) -> None:
        for number in (1, 2, 3, 4):
            cache.put(number)
            cache.get(number)
            cache.get(9)
        cache.clear()
        check(cache)
        reading = cache.stats()
        assert (reading.entries, reading.hits, reading.misses, reading.evictions) == (0, 0, 0, 0)

    @pytest.mark.usefixtures("eager_switches")
    def test_concurrent_hold_put_and_clear_keep_integrity(self, cache: HoldingAdapter) -> None:
        def use(seed: int) -> None:
            choice = random.Random(seed)
            for _ in range(150):
                hold = cache.hold(choice.randrange(10))
                cache.put(choice.randrange(10))
                if choice.random() < 0.1:
                    cache.clear()
                    cache.check_integrity()
                assert cache.num_references > 0
                hold.release()

        with ThreadPoolExecutor(NUM_THREADS) as threads:
            list(threads.map(use, range(NUM_THREADS)))
        check(cache)
        assert cache.num_references == cache.stats().pinned_bytes == 0
