"""A stored prefix is a copy, or buffers that no sequence uses."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_vlm.models.cache import KVCache

from tests.support.active_memory import active_bytes
from vlm_server.runner.kv.segments import SequenceState

NUM_TOKENS = 240
CAPACITY = 256


def layers() -> list[KVCache]:
    made = [KVCache(), KVCache()]
    for layer in made:
        layer.update_and_fetch(*(mx.random.normal((1, 2, NUM_TOKENS, 4)) for _ in range(2)))
    mx.eval([layer.state for layer in made])
    return made


def held_by(make: object) -> int:
    """Bytes that come alive by `make`."""
    before = active_bytes()
    stored = make()  # type: ignore[operator]
    mx.eval(stored.arrays)
    grown = active_bytes() - before
    del stored
    return grown


def test_exclusive_buffers_are_stored_without_copy():
    source = layers()
    state = SequenceState(source, {}, is_unused=True)
    assert held_by(lambda: state.take(0, NUM_TOKENS)) == 0
    taken, copied = state.take(0, NUM_TOKENS), SequenceState(source, {}).take(0, NUM_TOKENS)
    assert all(mx.array_equal(a, b) for a, b in zip(taken.arrays, copied.arrays, strict=True))
    assert taken.size_bytes == state.size_bytes(0, NUM_TOKENS) == 4 * 2 * CAPACITY * 4 * 4


@pytest.mark.parametrize(
    ("is_unused", "start", "end"),
    [(False, 0, NUM_TOKENS), (True, 60, NUM_TOKENS), (True, 0, 150)],
    ids=["buffers in use", "mostly stored before", "mostly empty"],
)
def test_shared_or_sparse_buffers_are_stored_as_copies(is_unused: bool, start: int, end: int):
    state = SequenceState(layers(), {}, is_unused=is_unused)
    num_bytes = 4 * 2 * (end - start) * 4 * 4
    assert state.size_bytes(start, end) == num_bytes
    assert held_by(lambda: state.take(start, end)) >= num_bytes


def test_split_segment_halves_report_their_sizes():
    segment = SequenceState(layers(), {}, is_unused=True).take(0, NUM_TOKENS)
    halves = segment.split(100)
    assert [half.size_bytes for half in halves] == [4 * 2 * n * 4 * 4 for n in (100, 140)]
