"""A full cache evicts in time independent of its number of entries."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.unit.cache.fakes import FakeSegment, FakeSnapshot, FakeSource
from tests.unit.cache.prompts import prompt_of
from vlm_server.cache.lru import LruCache
from vlm_server.cache.prefix import PrefixCache

NUM_ENTRIES = 40_000
NUM_MORE = 1_000
SECONDS = 0.5
"""0.003 and 0.025 s on an idle machine; 3 to 4 s if each eviction goes through all entries."""


def seconds_for_more(put: Callable[[int], None]) -> float:
    for number in range(NUM_ENTRIES):
        put(number)
    started = time.thread_time()
    for number in range(NUM_ENTRIES, NUM_ENTRIES + NUM_MORE):
        put(number)
    return time.thread_time() - started


def test_lru_eviction_time_is_independent_of_entry_count() -> None:
    cache = LruCache[int]("numbers", NUM_ENTRIES)
    pinned = cache.put("the oldest", -1, 1)
    assert seconds_for_more(lambda number: cache.put(str(number), number, 1).release()) < SECONDS
    assert cache.stats().evictions == NUM_MORE + 1
    pinned.release()


def test_prefix_eviction_time_is_independent_of_entry_count() -> None:
    cache = PrefixCache[FakeSegment, FakeSnapshot]("prefix", NUM_ENTRIES)

    def put(number: int) -> None:
        prompt = prompt_of([number])
        cache.insert(prompt, FakeSource(prompt))

    put(-1)
    pinned = cache.match(prompt_of([-1]), 1)
    assert seconds_for_more(put) < SECONDS
    assert cache.stats().evictions == NUM_MORE + 1
    pinned.release()
