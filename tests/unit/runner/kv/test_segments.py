"""A stored prefix is a copy, or buffers that no sequence uses; quantized, it never drifts."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import pytest
from mlx_vlm.models.cache import KVCache

from tests.support.active_memory import active_bytes
from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.runner.kv.segments import KVSegment, SequenceState, StateSize, restore

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
    mx.clear_cache()  # MLX gives an array a buffer of the pool that may be larger
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


# ---- quantized ---------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A `PrefixState` of whole segments."""

    parts: tuple[KVSegment, ...]
    snapshot: None = None

    @property
    def segments(self) -> list[tuple[KVSegment, int]]:
        return [(part, part.arrays[0].shape[2]) for part in self.parts]

    @property
    def length(self) -> int:
        return sum(count for _, count in self.segments)


def restored_layers(*parts: KVSegment) -> list[KVCache]:
    made = [KVCache(), KVCache()]
    restore(made, Stored(parts), CAPACITY)
    return made


def arrays_are_equal(some: KVSegment, other: KVSegment) -> bool:
    pairs = zip(some.arrays, other.arrays, strict=True)
    return all(a.dtype == b.dtype and bool(mx.array_equal(a, b)) for a, b in pairs)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("is_unused", [False, True], ids=["buffers in use", "unused buffers"])
def test_quantized_segment_takes_bytes_that_it_reports(bits: int, is_unused: bool):
    state = SequenceState(layers(), {}, is_unused=is_unused).stored_as(KVStorage(bits))
    num_bytes = 4 * 2 * NUM_TOKENS * (4 * bits // 8 + 4)
    assert state.size_bytes(0, NUM_TOKENS) == num_bytes
    assert state.take(0, NUM_TOKENS).size_bytes == num_bytes
    held = [held_by(lambda: state.take(0, NUM_TOKENS)) for _ in range(10)]
    assert max(held) >= num_bytes  # MLX may free a step's arrays a bit later
    assert min(held) < 1.2 * num_bytes


@pytest.mark.parametrize("bits", [8, 4])
def test_restored_sequence_is_stored_again_as_same_bytes_in_any_parts(bits: int):
    """However segments were split, merged, restored and extended."""
    storage, source = KVStorage(bits), layers()
    first = SequenceState(source, {}).stored_as(storage).take(0, 200)
    parts = (*first.split(70)[:1], *first.split(70)[1].split(50))
    sequence = restored_layers(*parts)
    for layer in sequence:
        layer.update_and_fetch(*(mx.random.normal((1, 2, 10, 4)) for _ in range(2)))
    state = SequenceState(sequence, {}, is_unused=True).stored_as(storage)
    assert arrays_are_equal(state.take(0, 200), first)
    assert arrays_are_equal(state.take(70, 120), parts[1])
    again = restored_layers(state.take(0, 130), state.take(130, 210))
    for layer, other in zip(again, sequence, strict=True):
        assert mx.array_equal(layer.state[0][:, :, :200], other.state[0][:, :, :200])
        assert mx.array_equal(layer.state[1][:, :, :200], other.state[1][:, :, :200])


def test_room_after_quantized_prefix_is_zero():
    for bits in (8, 4):
        part = SequenceState(layers(), {}).stored_as(KVStorage(bits)).take(0, 200)
        for layer in restored_layers(part):
            assert layer.offset == 200
            assert not mx.any(layer.keys[:, :, 200:])
            assert not mx.any(layer.values[:, :, 200:])


def test_planned_size_of_stored_tokens_is_that_of_segments():
    source = layers()
    for storage in (EXACT, KVStorage(8), KVStorage(4)):
        state = SequenceState(source, {}).stored_as(storage)
        planned = StateSize(source, NUM_TOKENS).stored_bytes_for(100, storage)
        assert planned == state.size_bytes(0, 100) == state.take(0, 100).size_bytes


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_segment_is_quantized_in_bounded_memory(bits: int, dtype: mx.Dtype):
    """All layers at once would need several times as much as the segment."""
    source, tokens = [KVCache() for _ in range(6)], 6000
    for layer in source:
        layer.update_and_fetch(*(mx.ones((1, 4, tokens, 64), dtype) for _ in range(2)))
    mx.eval([layer.state for layer in source])
    state = SequenceState(source, {}).stored_as(KVStorage(bits, 64))
    before = active_bytes()
    mx.reset_peak_memory()
    taken = state.take(0, tokens)
    mx.eval(taken.arrays)
    assert mx.get_peak_memory() - before <= state.size_bytes(0, tokens) + (20 << 20)
