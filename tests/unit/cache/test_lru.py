"""The LRU cache evicts the least recently used values, and never leased ones."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.support.integrity import check_integrity
from tests.support.whole_run import examples
from vlm_server.cache.lru import Lease, LruCache
from vlm_server.protocol import CacheStats


def cache_of(*keys: str, limit_bytes: int = 3) -> LruCache[str]:
    """Holds `keys`, put in this order, each of 1 byte, with itself as its value."""
    cache = LruCache[str]("letters", limit_bytes)
    for key in keys:
        cache.put(key, key, 1).release()
    return cache


def held(cache: LruCache[str]) -> str:
    check_integrity(cache)
    return "".join(key for key in "abcdefgh" if key in cache)


def test_stored_value_is_found() -> None:
    cache = cache_of("a", "b")
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == ("a", "b", None)
    assert cache.lease("c") is None


def test_oldest_entry_is_evicted_first() -> None:
    assert held(cache_of("a", "b", "c", "d")) == "bcd"


def test_get_counts_as_use() -> None:
    cache = cache_of("a", "b", "c")
    cache.get("a")
    cache.put("d", "d", 1).release()
    assert held(cache) == "acd"


def test_contains_is_neither_use_nor_hit() -> None:
    cache = cache_of("a", "b", "c")
    assert "a" in cache
    cache.put("d", "d", 1).release()
    assert held(cache) == "bcd"
    assert (cache.stats().hits, cache.stats().misses) == (0, 0)


def test_put_evicts_no_more_than_needed() -> None:
    cache = cache_of("a", "b", "c")
    cache.put("d", "d", 2).release()
    assert held(cache) == "cd"


def test_second_put_of_key_keeps_its_first_value() -> None:
    cache = cache_of("a")
    cache.put("a", "other", 2).release()
    assert cache.get("a") == "a"
    assert cache.stats().size_bytes == 1


def test_value_of_whole_limit_is_stored_and_larger_one_rejected() -> None:
    cache = cache_of("a", "b")
    cache.put("c", "c", 4).release()
    assert held(cache) == "ab"
    cache.put("d", "d", 3).release()
    assert held(cache) == "d"


def test_put_returns_lease() -> None:
    cache = cache_of("a", "b")
    lease = cache.put("c", "c", 1)
    assert (lease.value, cache.stats().pinned_bytes) == ("c", 1)
    cache.put("d", "d", 2).release()
    assert held(cache) == "cd"
    lease.release()
    assert cache.stats().pinned_bytes == 0


def test_second_put_leases_and_uses_first_value() -> None:
    cache = cache_of("a", "b", "c")
    lease = cache.put("a", "other", 2)
    assert (lease.value, cache.stats().pinned_bytes) == ("a", 1)
    lease.release()
    cache.put("d", "d", 1).release()
    assert held(cache) == "acd"
    assert (cache.stats().hits, cache.stats().misses) == (0, 0)


def test_value_without_room_is_leased_but_not_stored() -> None:
    cache = cache_of("a")
    lease = cache.put("b", "b", 4)
    assert lease.value == "b"
    assert cache.stats().pinned_bytes == 0
    lease.release()
    assert held(cache) == "a"


def test_lru_cache_with_limit_zero_stores_nothing() -> None:
    assert held(cache_of("a", limit_bytes=0)) == ""


def test_leased_entry_is_not_evicted_from_lru_cache() -> None:
    cache = cache_of("a", "b", "c")
    lease = cache.lease("a")
    assert lease is not None
    for key in "defg":
        cache.put(key, key, 1).release()
    assert held(cache) == "afg"
    assert lease.value == "a"


def test_value_without_room_next_to_leases_evicts_nothing() -> None:
    cache = cache_of("a", "b", "c")
    lease = cache.lease("a")
    assert lease is not None
    cache.put("d", "d", 3).release()
    assert held(cache) == "abc"
    lease.release()
    cache.put("d", "d", 3).release()
    assert held(cache) == "d"


def test_releasing_twice_raises_and_releases_no_other_lease() -> None:
    cache = cache_of("a")
    one, other = cache.lease("a"), cache.lease("a")
    assert one is not None
    assert other is not None
    one.release()
    with pytest.raises(RuntimeError, match="twice"):
        one.release()
    assert (cache.stats().pinned_bytes, cache.num_references) == (1, 1)
    cache.put("b", "b", 3).release()
    assert held(cache) == "a"
    other.release()
    assert cache.stats().pinned_bytes == cache.num_references == 0


def test_lease_of_unstored_value_counts_as_reference() -> None:
    cache = cache_of("a")
    lease = cache.put("b", "b", 4)
    assert cache.num_references == 1
    lease.release()
    assert cache.num_references == 0
    with pytest.raises(RuntimeError, match="twice"):
        lease.release()


def test_read_counts_hits_misses_and_evictions() -> None:
    cache = cache_of("a", "b", "c", "d")
    cache.get("a")
    cache.get("b")
    lease = cache.lease("c")
    assert lease is not None
    assert cache.stats() == CacheStats(
        name="letters",
        entries=3,
        size_bytes=3,
        pinned_bytes=1,
        limit_bytes=3,
        hits=2,
        misses=1,
        evictions=1,
    )


@dataclass
class Stored:
    key: str
    size_bytes: int
    leases: list[Lease[str]] = field(default_factory=list)


class LruMachine(RuleBasedStateMachine):
    """Random uses, beside a plain list of what should be there."""

    LIMIT = 6

    def __init__(self) -> None:
        super().__init__()
        self.limit = self.LIMIT
        self.cache = LruCache[str]("letters", self.limit)
        self.stored: list[Stored] = []
        self.hits = self.misses = self.evictions = 0

    @rule(key=st.sampled_from("abcdef"), size_bytes=st.integers(0, LIMIT + 1))
    def put(self, key: str, size_bytes: int) -> None:
        lease = self.cache.put(key, key, size_bytes)
        assert lease.value == key
        stored = self._last(key)
        if stored is None:
            pinned = sum(each.size_bytes for each in self.stored if each.leases)
            if size_bytes + pinned > self.limit:
                lease.release()
                return
            self._evict(size_bytes)
            stored = Stored(key, size_bytes)
            self.stored.append(stored)
        stored.leases.append(lease)

    @rule(key=st.sampled_from("abcdef"))
    def get(self, key: str) -> None:
        assert self.cache.get(key) == (key if self._used(key) else None)

    @rule(key=st.sampled_from("abcdef"))
    def lease(self, key: str) -> None:
        lease = self.cache.lease(key)
        stored = self._used(key)
        assert (lease is None) == (stored is None)
        if lease is not None and stored is not None:
            assert lease.value == key
            stored.leases.append(lease)

    @precondition(lambda self: any(each.leases for each in self.stored))
    @rule(choice=st.randoms(use_true_random=False))
    def release(self, choice: random.Random) -> None:
        lease = choice.choice([each for each in self.stored if each.leases]).leases.pop()
        lease.release()
        with pytest.raises(RuntimeError, match="twice"):
            lease.release()
        self._evict(0)

    @rule(limit=st.integers(0, LIMIT + 2))
    def resize(self, limit: int) -> None:
        self.limit = limit
        self.cache.resize(limit)
        self._evict(0)

    def _evict(self, size_bytes: int) -> None:
        """Make room for `size_bytes`, as far as entries are not leased."""
        for each in list(self.stored):
            if size_bytes + sum(one.size_bytes for one in self.stored) <= self.limit:
                return
            if not each.leases:
                self.stored.remove(each)
                self.evictions += 1

    @invariant()
    def cache_equals_the_model(self) -> None:
        check_integrity(self.cache)
        assert self.cache.num_references == sum(len(each.leases) for each in self.stored)
        assert {key for key in "abcdef" if key in self.cache} == {k.key for k in self.stored}
        assert self.cache.stats() == CacheStats(
            name="letters",
            entries=len(self.stored),
            size_bytes=sum(each.size_bytes for each in self.stored),
            pinned_bytes=sum(each.size_bytes for each in self.stored if each.leases),
            limit_bytes=self.limit,
            hits=self.hits,
            misses=self.misses,
            evictions=self.evictions,
        )

    def _used(self, key: str) -> Stored | None:
        stored = self._last(key)
        self.hits += stored is not None
        self.misses += stored is None
        return stored

    def _last(self, key: str) -> Stored | None:
        """The stored value of `key`, which becomes the most recently used."""
        stored = next((each for each in self.stored if each.key == key), None)
        if stored is not None:
            self.stored.remove(stored)
            self.stored.append(stored)
        return stored


TestLruMachine = LruMachine.TestCase
TestLruMachine.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


@pytest.mark.usefixtures("eager_switches")
def test_concurrent_leases_keep_lru_cache_intact() -> None:
    cache = LruCache[int]("numbers", 20)

    def use(seed: int) -> int:
        choice = random.Random(seed)
        for _ in range(1000):
            number = choice.randrange(16)
            cache.put(str(number), number, choice.randrange(1, 5)).release()
            lease = cache.lease(str(choice.randrange(16)))
            if choice.random() < 0.05:
                check_integrity(cache)
            if lease is not None:
                assert str(lease.value) in cache
                lease.release()
        return 1000

    with ThreadPoolExecutor(4) as threads:
        num_lookups = sum(threads.map(use, range(4)))
    check_integrity(cache)
    reading = cache.stats()
    assert reading.pinned_bytes == cache.num_references == 0
    assert reading.hits + reading.misses == num_lookups
