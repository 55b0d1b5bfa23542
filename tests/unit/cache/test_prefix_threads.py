"""A prefix cache stays usable and correct while one thread copies a segment."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from tests.support.integrity import check_integrity
from tests.unit.cache.fakes import FakeSegment, FakeSnapshot, FakeSource, TakeFailed, parts_in
from tests.unit.cache.prompts import CountedSalts, Item, parts_of, prompt_of
from vlm_server.cache.prefix import PrefixCache

CAT, DOG = ("cat", 3, 9), ("dog", 3, 9)
SECONDS = 20.0
Cache = PrefixCache[FakeSegment, FakeSnapshot]


def run_on_other_thread(work: Callable[[], object]) -> None:
    """Do `work` on another thread. Raises TimeoutError if it does not end."""
    threads = ThreadPoolExecutor(1)
    try:
        threads.submit(work).result(SECONDS)
    finally:
        threads.shutdown(wait=False)


@dataclass
class BusySource(FakeSource):
    """Other threads do `meanwhile` while it takes, each of them once."""

    meanwhile: list[Callable[[], object]] = field(default_factory=list)

    def take(self, start: int, end: int) -> FakeSegment:
        while self.meanwhile:
            run_on_other_thread(self.meanwhile.pop(0))
        return super().take(start, end)


def insert(cache: Cache, prompt: list[Item], *meanwhile: Callable[[], object]) -> BusySource:
    source = BusySource(prompt_of(prompt), meanwhile=list(meanwhile))
    cache.insert(source.prompt_key, source)
    check_integrity(cache)
    return source


def num_stored(cache: Cache, prompt: list[Item], salt: str = "") -> int:
    match = cache.match(prompt_of(prompt), 1000, salt)
    assert parts_in(match) == parts_of(prompt_of(prompt))[: match.length]
    match.release()
    return match.length


def test_copy_of_segment_does_not_block_other_threads() -> None:
    cache = Cache("prefix", 1000)
    readings = list[object]()
    insert(cache, [1, 2, 3], lambda: readings.append(cache.stats()))
    assert len(readings) == 1
    assert num_stored(cache, [1, 2, 3]) == 3


class BusySegment(FakeSegment):
    """Another thread reads `cache` while it is split."""

    cache: Cache

    def split(self, at: int) -> tuple[FakeSegment, FakeSegment]:
        run_on_other_thread(self.cache.stats)
        return super().split(at)


class BusySegmentSource(FakeSource):
    def take(self, start: int, end: int) -> FakeSegment:
        return BusySegment(super().take(start, end).parts)


def test_split_of_segment_does_not_block_other_threads() -> None:
    BusySegment.cache = cache = Cache("prefix", 1000)
    for prompt in (prompt_of([1, 2, 3, 4]), prompt_of([1, 2, 5])):
        cache.insert(prompt, BusySegmentSource(prompt))
    assert num_stored(cache, [1, 2, 3, 4]) == 4
    assert num_stored(cache, [1, 2, 5]) == 3
    check_integrity(cache)


@pytest.mark.parametrize(
    ("others", "takes", "size_bytes"),
    [
        ([1, 2, 3], [(0, 3)], 3),
        ([1, 2, 3, 4], [(0, 3)], 4),
        ([1, 2], [(0, 3), (2, 3)], 3),
        ([1, 2, 4], [(0, 3), (2, 3)], 4),
        ([5], [(0, 3)], 4),
    ],
)
def test_prefix_stored_during_copy_is_not_stored_twice(
    others: list[Item], takes: list[tuple[int, int]], size_bytes: int
) -> None:
    cache = Cache("prefix", 1000)
    source = insert(cache, [1, 2, 3], lambda: insert(cache, others))
    assert source.takes == takes
    assert (num_stored(cache, [1, 2, 3]), num_stored(cache, others)) == (3, len(others))
    assert cache.stats().size_bytes == size_bytes
    assert cache.num_references == 0


def test_parent_of_new_segment_survives_clear_during_copy() -> None:
    cache = Cache("prefix", 1000)
    insert(cache, [1, 2])
    insert(cache, [3])
    source = insert(cache, [1, 2, 4], cache.clear, lambda: insert(cache, [1, 5]))
    assert source.takes == [(2, 3)]
    assert num_stored(cache, [1, 2, 4]) == 3
    assert (num_stored(cache, [3]), num_stored(cache, [1, 5])) == (0, 2)


@pytest.mark.parametrize(
    ("others", "takes"),
    [
        ([1, 2, 3, 4], [(0, 4)]),
        ([1, 2, 3, 4, 5], [(0, 4)]),
        ([1, 2, 3, 6], [(0, 4), (3, 4)]),
        ([1, 2, 6], [(0, 4), (2, 4)]),
        ([1, 6], [(0, 4), (1, 4)]),
        ([6], [(0, 4)]),
    ],
)
def test_segment_may_be_split_or_extended_while_it_is_joined(
    others: list[Item], takes: list[tuple[int, int]]
) -> None:
    cache = Cache("prefix", 1000)
    insert(cache, [1, 2])
    insert(cache, [1, 2, 3])
    source = BusySource(prompt_of([1, 2, 3, 4]), meanwhile=[lambda: insert(cache, others)])
    cache.insert(source.prompt_key, source, merges_parts=True)
    check_integrity(cache)
    assert source.takes == takes
    assert (num_stored(cache, [1, 2, 3, 4]), num_stored(cache, others)) == (4, len(others))
    assert cache.num_references == 0


def test_segment_may_be_evicted_while_it_is_joined() -> None:
    cache = Cache("prefix", 1000)
    insert(cache, [1, 2])
    source = BusySource(prompt_of([1, 2, 3]), meanwhile=[lambda: cache.evict(1)])
    cache.insert(source.prompt_key, source, merges_parts=True)
    assert source.takes == [(0, 3), (0, 3)]
    assert num_stored(cache, [1, 2, 3]) == 3


def test_segment_may_be_matched_while_it_is_joined() -> None:
    cache = Cache("prefix", 1000)
    insert(cache, [1, 2])
    matches = []

    def match() -> None:
        matches.append(cache.match(prompt_of([1, 2]), 2))

    source = BusySource(prompt_of([1, 2, 3]), meanwhile=[match])
    cache.insert(source.prompt_key, source, merges_parts=True)
    check_integrity(cache)
    assert source.takes == [(0, 3), (2, 3)]
    assert num_stored(cache, [1, 2, 3]) == 3
    matches[0].release()
    assert cache.num_references == 0


def test_concurrent_inserts_of_new_salts_do_not_interfere() -> None:
    cache = Cache("prefix", 1000)
    other = prompt_of([7])
    source = insert(cache, [1], lambda: cache.insert(other, FakeSource(other), "other"))
    assert source.takes == [(0, 1)], "its root stays while its part is taken"
    assert num_stored(cache, [1]) == 1
    assert num_stored(cache, [7], "other") == 1


def test_failed_inserts_leave_no_root_for_their_salt() -> None:
    cache, salts = Cache("prefix", 1000), CountedSalts()
    prompt = prompt_of([7])
    for number in range(5):
        with pytest.raises(TakeFailed):
            cache.insert(prompt, FakeSource(prompt, failing=0), salts.new(f"salt {number}"))
    assert salts.num_alive <= 1


def test_room_used_by_another_thread_during_copy_stays_used() -> None:
    cache = Cache("prefix", 3)
    held = list[object]()

    def store_and_keep() -> None:
        insert(cache, [7, 8])
        held.append(cache.match(prompt_of([7, 8]), 2))

    source = insert(cache, [1, 2], store_and_keep)
    assert source.takes == [(0, 2)]
    assert (num_stored(cache, [1, 2]), num_stored(cache, [7, 8])) == (0, 2)
    assert (cache.stats().size_bytes, cache.num_references) == (2, 1)


def test_failed_copy_releases_its_references() -> None:
    cache = Cache("prefix", 1000)
    insert(cache, [1, 2])
    prompt = prompt_of([1, 2, 3])
    with pytest.raises(TakeFailed):
        cache.insert(prompt, FakeSource(prompt, failing=0))
    assert cache.num_references == cache.stats().pinned_bytes == 0
    check_integrity(cache)


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("needs_snapshots", [False, True])
@pytest.mark.parametrize("limit_bytes", [30, 1000])
def test_concurrent_insert_match_evict_and_clear_keep_integrity(
    limit_bytes: int, needs_snapshots: bool
) -> None:
    cache = Cache("prefix", limit_bytes, needs_snapshots=needs_snapshots)
    start = threading.Barrier(4)

    def use(seed: int) -> None:
        choice = random.Random(seed)
        start.wait(SECONDS)
        for _ in range(250):
            prompt, salt = prompt_of(choice.choices([1, 2, CAT, DOG], k=4)), choice.choice("abc")
            positions = frozenset([prompt.floor(3), len(prompt)])
            match = cache.match(prompt, 8, salt)
            try:
                failing = choice.choice([None, None, 0, 1])
                cache.insert(prompt, FakeSource(prompt, positions, failing), salt)
            except TakeFailed:
                pass
            match = cache.rematch(match, prompt, 8, salt)
            assert parts_in(match) == parts_of(prompt)[: match.length]
            match choice.randrange(10):
                case 0:
                    cache.clear()
                case 1 | 2:
                    cache.evict(choice.randrange(20))
                case _:
                    pass
            check_integrity(cache)
            assert parts_in(match) == parts_of(prompt)[: match.length]
            match.release()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(4)))
    check_integrity(cache)
    assert cache.stats().pinned_bytes == cache.num_references == 0
    cache.clear()
    assert (cache.stats().size_bytes, cache.stats().entries) == (0, 0)
