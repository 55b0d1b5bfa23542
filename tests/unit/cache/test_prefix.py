"""Single cases of the prefix cache: what is stored, what is evicted first, what is counted."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.integrity import check_integrity
from tests.unit.cache.fakes import (
    SNAPSHOT_BYTES,
    FakeSegment,
    FakeSnapshot,
    FakeSource,
    TakeFailed,
    parts_in,
)
from tests.unit.cache.prompts import CountedSalts, Item, parts_of, prompt_of
from vlm_server.cache import prefix
from vlm_server.cache.lru import LruCache
from vlm_server.cache.prefix import PrefixCache
from vlm_server.protocol import CacheStats

CAT, DOG = ("cat", 3, 9), ("dog", 3, 9)
LONG_CAT = ("cat", 4, 9)
Cache = PrefixCache[FakeSegment, FakeSnapshot]


def cache_of(*prompts: list[Item], limit_bytes: int = 1000) -> Cache:
    cache = Cache("prefix", limit_bytes)
    for prompt in prompts:
        insert(cache, prompt)
    return cache


def insert(
    cache: Cache, prompt: list[Item], *positions: int, salt: str = "", merges_parts: bool = False
) -> FakeSource:
    """The source, which knows what was taken from it."""
    source = FakeSource(prompt_of(prompt), frozenset(positions))
    cache.insert(source.prompt_key, source, salt, merges_parts=merges_parts)
    check_integrity(cache)
    return source


def num_known(cache: Cache, prompt: list[Item], limit: int = 1000, salt: str = "") -> int:
    match = cache.match(prompt_of(prompt), limit, salt)
    assert parts_in(match) == parts_of(prompt_of(prompt))[: match.length]
    match.release()
    check_integrity(cache)
    return match.length


@pytest.mark.parametrize(("min_length", "length"), [(0, 3), (3, 3), (4, 0)])
def test_match_below_minimum_length_is_empty(min_length: int, length: int) -> None:
    cache = cache_of([1, 2, 3])
    prompt_key = prompt_of([1, 2, 3, 4, 5])
    nothing = cache.match(prompt_key, 0)
    for match in (
        cache.match(prompt_key, 4, "", min_length),
        cache.rematch(nothing, prompt_key, 4, "", min_length),
    ):
        assert match.length == length
        match.release()
    assert cache.stats().pinned_bytes == 0
    check_integrity(cache)


def test_insert_copies_only_new_positions() -> None:
    cache = cache_of([1, 2, 3])
    assert insert(cache, [1, 2, 3]).takes == []
    assert insert(cache, [1, 2]).takes == []
    assert cache.stats().entries == 1, "a beginning of what is here cuts nothing"
    assert insert(cache, [1, 2, 3, 4, 5]).takes == [(3, 5)]
    assert insert(cache, [1, 2, 6]).takes == [(2, 3)]
    assert insert(cache, [7]).takes == [(0, 1)]
    assert cache.stats().size_bytes == 7


def test_conversation_is_stored_in_few_segments() -> None:
    cache, prompt, num_taken = cache_of(limit_bytes=10_000), list[Item](), 0
    for turn in range(40):
        for new in ([("cat", 30, turn), *range(4)], [turn, turn]):  # a question, then an answer
            prompt += new
            takes = insert(cache, prompt, merges_parts=True).takes
            num_taken += sum(end - start for start, end in takes)
            match = cache.match(prompt_of(prompt), 10_000)
            assert match.length == len(prompt_of(prompt))
            assert len(match.segments) <= math.log2(match.length)
            match.release()
    assert num_known(cache, prompt, limit=10_000) == cache.stats().size_bytes == 40 * 36
    assert num_taken < 5 * 40 * 36
    assert cache.stats().evictions == 0


def test_join_rewrites_only_unshared_unpinned_segments() -> None:
    cache = cache_of([1, 2], [1, 2, 3], [1, 2, 4], limit_bytes=6)
    assert insert(cache, [1, 2, 4, 5], merges_parts=True).takes == [(2, 4)], "3 goes on from 2, too"
    match = cache.match(prompt_of([1, 2, 4, 5]), 1000)
    assert insert(cache, [1, 2, 4, 5, 6], merges_parts=True).takes == [(4, 5)], "4 and 5 are held"
    match.release()
    assert insert(cache, [1, 2, 4, 5, 6, 7], merges_parts=True).takes == [(2, 6)], "3 made room"
    assert num_known(cache, [1, 2, 3]) == 2
    assert insert(cache, [1, 2, 4, 5, 6, 7, 8], merges_parts=True).takes == [], "there is no room"
    assert num_known(cache, [1, 2, 4, 5, 6, 7, 8]) == 6


def test_join_drops_short_answers_without_continuation() -> None:
    prompt_items = list[Item](range(20))
    for answer, takes in (([70, 71], [(0, 30)]), ([*range(70, 76)], [(20, 30)])):
        cache = cache_of(prompt_items, [*prompt_items, *answer])
        assert insert(cache, [*range(30)], merges_parts=True).takes == takes
        assert num_known(cache, [*range(30)]) == 30
        is_dropped = takes == [(0, 30)]
        assert num_known(cache, [*prompt_items, *answer]) == 20 + (0 if is_dropped else len(answer))
        assert cache.stats().evictions == is_dropped


def test_join_does_not_scan_children_of_shared_prefix() -> None:
    class Counted(dict[Any, Any]):
        num_asked = 0

        def values(self) -> Any:
            self.num_asked += 1
            return super().values()

    cache = cache_of(*([1, 2, 3, branch] for branch in range(10, 110)))
    node, _ = cache._tree.walk(prompt_of([1, 2, 3]), 3, "")[-1]
    node.children = counted = Counted(node.children)
    assert not prefix._can_merge([node], 6)
    assert not counted.num_asked
    assert insert(cache, [1, 2, 3, 200, 201, 202], merges_parts=True).takes == [(3, 6)]


def test_long_segments_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "_MAX_MERGED_BYTES", 4)
    cache = cache_of([1, 2], [1, 2, 3])
    assert insert(cache, [1, 2, 3, 4, 5], merges_parts=True).takes == [(2, 5)]
    assert num_known(cache, [1, 2, 3, 4, 5]) == 5


def test_edge_is_split_before_differing_span() -> None:
    cache = cache_of([1, CAT, 2], [1, DOG, 2])
    assert num_known(cache, [1, CAT, 2]) == num_known(cache, [1, DOG, 2]) == 5
    assert num_known(cache, [1, ("bird", 3, 9), 2]) == 1
    assert num_known(cache, [1, 9, 9, 9, 2]) == 1
    assert num_known(cache, [1, CAT, 2], limit=3) == 1


def test_span_key_with_two_lengths_keeps_first() -> None:
    cache = cache_of([1, CAT, 2])
    assert insert(cache, [1, LONG_CAT, 2]).takes == []
    assert num_known(cache, [1, LONG_CAT, 2]) == 1
    assert num_known(cache, [1, CAT, 2]) == 5


def test_match_limit_past_prompt_is_its_end() -> None:
    cache = cache_of([1, 2, 3])
    assert num_known(cache, [1, 2, 3], limit=4) == 3
    assert num_known(cache, [1, 2], limit=3) == 2
    assert num_known(cache, [], limit=1) == 0


def test_prefix_cache_salts_share_no_entries() -> None:
    cache = cache_of([1, 2])
    assert num_known(cache, [1, 2], salt="other") == 0
    assert insert(cache, [1, 2], salt="other").takes == [(0, 2)]
    assert cache.stats().size_bytes == 4


def test_roots_of_evicted_salts_are_removed() -> None:
    cache, salts = cache_of(limit_bytes=2), CountedSalts()
    for number in range(100):
        insert(cache, [1, 2], salt=salts.new(str(number)))
    insert(cache, [1, 2, 3], salt=salts.new("larger than the room"))
    assert num_known(cache, [1, 2], salt="99") == 2
    assert 1 <= salts.num_alive <= 3


def test_leaf_segments_are_evicted_before_their_parents() -> None:
    cache = cache_of([1, 2, 3, 4], [1, 2, 5], limit_bytes=6)
    insert(cache, [7, 8])
    assert num_known(cache, [1, 2, 3, 4]) == 2
    assert num_known(cache, [1, 2, 5]) == 3
    assert num_known(cache, [7, 8]) == 2
    assert cache.stats().evictions == 1


def test_recently_matched_prefix_is_evicted_later() -> None:
    cache = cache_of([1, 2], [3, 4], [5, 6], limit_bytes=6)
    assert num_known(cache, [1]) == 1
    insert(cache, [7])
    assert [num_known(cache, [n, n + 1]) for n in (1, 3, 5)] == [2, 0, 2]


def test_matched_prefix_stays_and_no_eviction_is_in_vain() -> None:
    cache = cache_of([1, 2, 3], [4], limit_bytes=4)
    match = cache.match(prompt_of([1, 2, 3]), 2)
    assert cache.stats().pinned_bytes == 3
    insert(cache, [5, 6])
    assert (num_known(cache, [1, 2, 3]), num_known(cache, [4])) == (3, 1)
    insert(cache, [5])
    assert (num_known(cache, [1, 2, 3]), num_known(cache, [4])) == (3, 0)
    match.release()
    assert cache.stats().pinned_bytes == 0
    insert(cache, [5, 6, 7, 8])
    assert num_known(cache, [1, 2, 3]) == 0


def test_matched_prefix_stays_when_its_edge_is_split() -> None:
    cache = cache_of([1, 2, 3, 4], limit_bytes=6)
    match = cache.match(prompt_of([1, 2, 3, 4]), 4)
    for prompt in ([1, 2, 5], [1, 6], [7, 8], [9]):
        insert(cache, list(prompt))
    assert num_known(cache, [1, 2, 3, 4]) == 4
    assert cache.stats().pinned_bytes == 4
    match.release()
    check_integrity(cache)
    assert cache.stats().pinned_bytes == 0


def test_second_release_of_match_raises_and_keeps_other_matches() -> None:
    cache = cache_of([1, 2])
    one, other = (cache.match(prompt_of([1, 2]), 2) for _ in range(2))
    nothing = cache.match(prompt_of([3]), 1)
    assert cache.num_references == 3
    for match in (one, nothing):
        match.release()
        with pytest.raises(RuntimeError, match="twice"):
            match.release()
    assert (cache.stats().pinned_bytes, cache.num_references) == (2, 1)
    other.release()
    assert cache.stats().pinned_bytes == cache.num_references == 0


def test_longer_match_replaces_shorter_one() -> None:
    cache = cache_of([1, 2], [3])
    prompt = prompt_of([1, 2, 3, 4])
    worse = cache.match(prompt, 4)
    assert cache.rematch(worse, prompt, 4) is worse
    insert(cache, [1, 2, 3])
    better = cache.rematch(worse, prompt, 4)
    assert (better.length, worse.segments) == (3, ())
    assert cache.stats().hits == 1
    better.release()
    assert cache.stats().pinned_bytes == 0


def test_failed_copy_leaves_tree_intact() -> None:
    cache = cache_of([1, 2, 3])
    prompt_key = prompt_of([1, 4])
    with pytest.raises(TakeFailed):
        cache.insert(prompt_key, FakeSource(prompt_key, failing=0))
    check_integrity(cache)
    assert (num_known(cache, [1, 2, 3]), num_known(cache, [1, 4])) == (3, 1)
    assert cache.stats().pinned_bytes == 0


def test_prefix_cache_with_limit_zero_copies_nothing() -> None:
    cache = cache_of(limit_bytes=0)
    assert insert(cache, [1]).takes == []


def test_matches_end_at_snapshots_where_they_are_needed() -> None:
    cache = Cache("prefix", 1000, needs_snapshots=True)
    assert insert(cache, [1, CAT, 2, 3], 4, 5).takes == [(0, 4), (4, 5)]
    assert num_known(cache, [1, CAT, 2, 3]) == 5
    assert num_known(cache, [1, CAT, 2, 3], limit=4) == 4
    assert num_known(cache, [1, CAT, 2, 3], limit=3) == 0
    match = cache.match(prompt_of([1, CAT, 4]), 5)
    assert match.snapshot == FakeSnapshot(parts_of(prompt_of([1, CAT])))
    match.release()


def test_later_snapshot_splits_edge_and_copies_nothing() -> None:
    cache = Cache("prefix", 1000, needs_snapshots=True)
    insert(cache, [1, 2, 3, 4], 4)
    assert insert(cache, [1, 2, 3], 2).takes == []
    assert num_known(cache, [1, 2, 5]) == 2
    assert num_known(cache, [1, 2, 3, 4]) == 4
    assert cache.stats().size_bytes == 4 + 2 * SNAPSHOT_BYTES


def test_snapshot_at_position_zero_is_ignored() -> None:
    cache = Cache("prefix", 1000, needs_snapshots=True)
    insert(cache, [1, 2], 0)
    assert cache.stats().size_bytes == 0


class LayersOf(tuple[FakeSegment, ...]):
    """The layers of a model none of whose layers can be split."""

    size_bytes = 0

    def split(self, at: int) -> tuple[LayersOf, LayersOf]:
        return self, self


class NoLayersSource(FakeSource):
    def take(self, start: int, end: int) -> LayersOf:  # type: ignore[override]
        return LayersOf()


def test_segment_without_layers_is_still_matched() -> None:
    cache = PrefixCache[LayersOf, FakeSnapshot]("prefix", 1000, needs_snapshots=True)
    prompt_key = prompt_of([1, 2])
    cache.insert(prompt_key, NoLayersSource(prompt_key, frozenset([1, 2])))
    assert cache.match(prompt_key, 2).segments == (((), 1), ((), 1))


def test_prefix_cache_stats_count_entries_and_lookups() -> None:
    cache = cache_of([1, 2], [3, 4], [5, 6], limit_bytes=4)
    num_known(cache, [1])
    num_known(cache, [3])
    match = cache.match(prompt_of([5, 6]), 1)
    assert match.length == 1
    assert cache.stats() == CacheStats(
        name="prefix",
        entries=2,
        size_bytes=4,
        pinned_bytes=2,
        limit_bytes=4,
        hits=2,
        misses=1,
        evictions=1,
    )


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("needs_snapshots", [False, True])
def test_concurrent_matches_and_inserts_keep_prefix_cache_intact(needs_snapshots: bool) -> None:
    cache = Cache("prefix", 30, needs_snapshots=needs_snapshots)

    def use(seed: int) -> int:
        choice = random.Random(seed)
        for _ in range(300):
            prompt_key = prompt_of(choice.choices([1, 2, CAT, DOG], k=4))
            source = FakeSource(prompt_key, frozenset([prompt_key.floor(3), len(prompt_key)]))
            match = cache.match(prompt_key, 8)
            cache.insert(prompt_key, source)
            match = cache.rematch(match, prompt_key, 8)
            assert parts_in(match) == parts_of(prompt_key)[: match.length]
            if choice.random() < 0.1:
                check_integrity(cache)
            match.release()
        return 300

    with ThreadPoolExecutor(4) as threads:
        prompt_items = sum(threads.map(use, range(4)))
    check_integrity(cache)
    reading = cache.stats()
    assert reading.pinned_bytes == 0
    assert reading.hits + reading.misses == prompt_items


def test_resize_evicts_all_but_pinned_segments_at_once() -> None:
    cache = cache_of([1, 2, 3], [4, 5, 6], [7, 8, 9])
    match = cache.match(prompt_of([4, 5, 6]), 1000)
    size = cache.stats().size_bytes
    cache.resize(size // 3)
    check_integrity(cache)
    assert [num_known(cache, [n, n + 1, n + 2]) for n in (1, 4, 7)] == [0, 3, 0]
    cache.resize(1)
    check_integrity(cache)
    assert match.length == 3
    match.release()
    insert(cache, [1, 2, 3])
    assert cache.stats().size_bytes == 0
    cache.resize(1000)
    insert(cache, [1, 2, 3])
    assert num_known(cache, [1, 2, 3]) == 3


# ---- many entries --------------------------------------------------------------------


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
