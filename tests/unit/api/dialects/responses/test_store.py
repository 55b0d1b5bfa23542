"""Stored responses: their owners, lifetimes and sizes."""

from __future__ import annotations

import random

import pytest

from vlm_server.api.dialects.responses.store import OVERHEAD_BYTES, ResponseStore
from vlm_server.errors import NotFound, PreviousResponseNotFound
from vlm_server.settings import Server


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> ResponseStore:
    return ResponseStore(
        Server(max_responses_bytes=10 * OVERHEAD_BYTES, responses_keep_seconds=60), clock
    )


def answer(
    store: ResponseStore, name: str, previous: str | None = None, size: int = 0, client: str = ""
) -> bool:
    """Store a whole turn; its items are `name`, padded to `size`."""
    begun = store.begin(client, name, previous, name.encode().ljust(size), b"")
    kept = store.finish(client, name, b"R" + name.encode(), name.upper().encode())
    assert kept == begun
    return kept


def test_store_recalls_turns_in_their_order(store: ResponseStore) -> None:
    answer(store, "a")
    answer(store, "b", "a")
    answer(store, "c", "b")
    answer(store, "x", "a")
    assert store.recall("", "c") == (b"a", b"A", b"b", b"B", b"c", b"C")
    assert store.recall("", "x") == (b"a", b"A", b"x", b"X")
    assert store.input_items("", "c") == (b"a", b"A", b"b", b"B", b"c")
    assert store.response("", "c") == b"Rc"


def test_store_hides_responses_of_other_owners(store: ResponseStore) -> None:
    answer(store, "a", client="me")
    with pytest.raises(PreviousResponseNotFound):
        store.recall("you", "a")
    for ask in (store.response, store.delete, store.input_items):
        with pytest.raises(NotFound):
            ask("you", "a")
    assert not answer(store, "b", "a", client="you")
    assert store.response("me", "a") == b"Ra"


def test_unfinished_response_is_retrievable_but_not_continuable(store: ResponseStore) -> None:
    store.begin("", "a", None, b"a", b"so far")
    assert store.response("", "a") == b"so far"
    with pytest.raises(PreviousResponseNotFound):
        store.recall("", "a")
    store.abandon("", "a")
    assert (len(store), store.size_bytes) == (0, 0)


def test_abandoning_finished_response_keeps_it(store: ResponseStore) -> None:
    answer(store, "a")
    store.abandon("", "a")
    assert store.response("", "a") == b"Ra"


def test_response_deleted_before_its_end_stays_deleted(store: ResponseStore) -> None:
    store.begin("", "a", None, b"a", b"so far")
    store.delete("", "a")
    assert not store.finish("", "a", b"Ra", b"A")
    assert (len(store), store.size_bytes) == (0, 0)


def test_response_is_dropped_when_it_expires(store: ResponseStore, clock: Clock) -> None:
    answer(store, "a")
    clock.now = 30
    answer(store, "b", "a")
    clock.now = 60
    with pytest.raises(NotFound):
        store.response("", "a")
    assert store.recall("", "b") == (b"a", b"A", b"b", b"B")  # its turn lives on in this one
    clock.now = 90
    with pytest.raises(PreviousResponseNotFound):
        store.recall("", "b")
    assert (len(store), store.size_bytes) == (0, 0)


def test_store_evicts_oldest_responses(store: ResponseStore) -> None:
    for name in "abc":
        answer(store, name, size=2 * OVERHEAD_BYTES)
    answer(store, "d", size=2 * OVERHEAD_BYTES)
    with pytest.raises(NotFound):
        store.response("", "a")
    assert store.response("", "d") == b"Rd"
    assert store.size_bytes <= 10 * OVERHEAD_BYTES


def test_store_evicts_from_largest_owner(store: ResponseStore) -> None:
    for name in "abc":
        answer(store, name, size=2 * OVERHEAD_BYTES - 16, client="mine")
    for i in range(20):
        assert answer(store, f"x{i}", size=2 * OVERHEAD_BYTES - 16, client="greedy")
    assert store.response("mine", "c") == b"Rc"
    assert store.response("greedy", "x19") == b"Rx19"
    assert store.num_evicted == 20
    assert len(store) == 3
    assert store.size_bytes <= 10 * OVERHEAD_BYTES


def test_owner_exceeds_its_share_only_in_unused_bytes(store: ResponseStore) -> None:
    assert answer(store, "a", size=2 * OVERHEAD_BYTES, client="mine")
    assert answer(store, "x", size=5 * OVERHEAD_BYTES, client="other")
    assert not answer(store, "y", size=7 * OVERHEAD_BYTES, client="other")
    assert not answer(store, "b", "a", size=2 * OVERHEAD_BYTES, client="mine")
    assert store.response("mine", "a") == b"Ra"
    assert store.response("other", "x") == b"Rx"


def test_store_tells_when_next_response_expires(store: ResponseStore, clock: Clock) -> None:
    assert store.seconds_left() is None
    answer(store, "a", client="me")
    clock.now = 10
    answer(store, "b", client="you")
    assert store.seconds_left() == 50
    clock.now = 60
    store.drop_expired()
    assert (len(store), store.seconds_left()) == (1, 10)


def test_oversized_response_evicts_no_other(store: ResponseStore) -> None:
    answer(store, "a", size=5 * OVERHEAD_BYTES)
    assert not answer(store, "b", "a", size=5 * OVERHEAD_BYTES)
    assert not answer(store, "c", size=11 * OVERHEAD_BYTES)
    assert store.response("", "a") == b"Ra"


def test_response_that_grows_too_large_is_dropped(store: ResponseStore) -> None:
    answer(store, "a")
    store.begin("", "b", "a", b"b", b"")
    assert not store.finish("", "b", b"R" * 10 * OVERHEAD_BYTES, b"B")
    with pytest.raises(NotFound):
        store.response("", "b")
    assert store.response("", "a") == b"Ra"


def test_store_of_zero_bytes_keeps_nothing() -> None:
    store = ResponseStore(Server(max_responses_bytes=0))
    assert not answer(store, "a")
    assert (len(store), store.size_bytes) == (0, 0)


def test_store_size_is_exact_and_bounded_after_random_operations(
    store: ResponseStore, clock: Clock
) -> None:
    rng = random.Random(7)
    for step in range(3000):
        name, other = f"r{step}", f"r{rng.randrange(max(step - 12, 0), step + 1)}"
        owner = f"o{rng.randrange(3)}"
        clock.now += rng.choice((0, 0, 1, 20))
        kind = rng.randrange(7)
        if kind == 0:
            store.begin(owner, name, None, b"i" * rng.randrange(3000), b"so far")
        elif kind == 1:
            store.begin(owner, name, other, b"i" * rng.randrange(3000), b"so far")
        elif kind == 2:
            store.finish(owner, other, b"r" * rng.randrange(500), b"o" * rng.randrange(3000))
        elif kind == 3:
            store.abandon(owner, other)
        elif kind == 4:
            store.update(owner, other, b"u" * rng.randrange(500))
        elif kind == 5:
            store.fail(owner, other, b"f" * rng.randrange(500))
        else:
            try:
                store.delete(owner, other)
            except NotFound:
                continue
        assert 0 <= store.size_bytes <= 10 * OVERHEAD_BYTES
    for step in range(3000):  # as the end of each request does
        for owner in ("o0", "o1", "o2"):
            store.abandon(owner, f"r{step}")
    clock.now += 1000
    with pytest.raises(NotFound):
        store.response("", "none")
    assert (len(store), store.size_bytes) == (0, 0)


# ---- in the background -----------------------------------------------------------------


def test_updated_response_counts_its_new_bytes(store: ResponseStore) -> None:
    store.begin("", "a", None, b"a", b"queued")
    before = store.size_bytes
    store.update("", "a", b"in progress")
    assert store.response("", "a") == b"in progress"
    assert store.size_bytes - before == len(b"in progress") - len(b"queued")
    answer(store, "b")
    store.update("", "b", b"too late")
    store.update("", "c", b"never there")
    assert store.response("", "b") == b"Rb"


def test_failed_response_is_kept_but_not_continuable(store: ResponseStore) -> None:
    store.begin("", "a", None, b"a", b"so far")
    assert store.fail("", "a", b"failed")
    assert store.response("", "a") == b"failed"
    with pytest.raises(PreviousResponseNotFound):
        store.recall("", "a")
    assert not store.begin("", "b", "c", b"b", b"")
    store.abandon("", "a")
    assert not store.finish("", "a", b"late", b"late")
    assert store.response("", "a") == b"failed"


def test_unfinished_response_does_not_expire(store: ResponseStore, clock: Clock) -> None:
    store.begin("", "running", None, b"r", b"in progress")
    assert store.seconds_left() is None
    answer(store, "a")
    clock.now = 100
    assert store.seconds_left() == 0
    assert store.response("", "running") == b"in progress"
    with pytest.raises(NotFound):
        store.response("", "a")
    assert store.seconds_left() is None
    assert store.finish("", "running", b"done", b"[]")
    assert store.seconds_left() == 60


def test_unfinished_responses_are_evicted_last(store: ResponseStore) -> None:
    store.begin("", "running", None, b"r", b"in progress")
    for name in "abcdefghijkl":
        assert answer(store, name)
    assert store.response("", "running") == b"in progress"
    assert store.num_evicted
    assert store.finish("", "running", b"done", b"[]")
    assert store.size_bytes <= store.limit_bytes
