"""With a window, each row's tokens attend to the last ones of its own, whatever was dropped."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_vlm.models.cache import RotatingKVCache

from tests.support.whole_run import examples
from vlm_server.runner.kv import batch_cache
from vlm_server.runner.kv.batch_cache import RowsKVCache, filter_rows, join
from vlm_server.runner.kv.window_cache import WindowKVCache, buffer_capacity

WINDOW = 300
Layer = WindowKVCache | RowsKVCache


def numbered(rows: list[range]) -> tuple[mx.array, mx.array]:
    """Keys whose numbers are those of `rows`, (rows, 1, tokens, 1), and values one larger."""
    keys = mx.array(np.array([list(row) for row in rows], dtype=np.float32))[:, None, :, None]
    return keys, keys + 1


def seen(layer: Layer, rows: list[range]) -> list[list[list[int]]]:
    """The numbers of the keys that each new token of each row attends to; appends `rows`."""
    count = len(rows[0])
    mask = layer.make_mask(count, window_size=WINDOW)
    keys, values = layer.update_and_fetch(*numbered(rows))
    size = keys.shape[2]
    if mask is None:
        allowed = np.ones((len(rows), count, size), dtype=bool)
    elif isinstance(mask, str):
        allowed = np.tril(np.ones((1, count, size), dtype=bool), size - count)
    else:
        allowed = np.broadcast_to(np.array(mask), (len(rows), 1, count, size))[:, 0]
    numbers, more = (np.array(side)[:, 0, :, 0].astype(int) for side in (keys, values))
    assert (more == numbers + 1)[allowed.any(axis=1)].all()
    return [
        [numbers[row][allowed[row, token]].tolist() for token in range(count)]
        for row in range(len(rows))
    ]


@dataclass
class Batch:
    """The layer of a batch, and what its rows hold."""

    layers: list[Layer] = field(default_factory=list)
    lengths: list[tuple[int, int]] = field(default_factory=list)
    """First number and number of tokens of each row."""

    def join(self, num_tokens: int, count: int, start: int) -> None:
        prompt = WindowKVCache(WINDOW)
        for begin in range(0, num_tokens, 128):
            end = min(begin + 128, num_tokens)
            prompt.update_and_fetch(*numbered([range(start + begin, start + end)]))
        self.layers = join(self.layers, len(self.lengths), [prompt], count)
        self.lengths += [(start, num_tokens)] * count

    def step(self, width: int = 1) -> None:
        new = [range(start + count, start + count + width) for start, count in self.lengths]
        expected = [
            [list(range(max(start, last - WINDOW + 1), last + 1)) for last in row]
            for (start, _), row in zip(self.lengths, new, strict=True)
        ]
        assert seen(self.layers[0], new) == expected
        self.lengths = [(start, count + width) for start, count in self.lengths]

    def leave(self, row: int) -> None:
        staying = [i for i in range(len(self.lengths)) if i != row]
        self.lengths = [self.lengths[i] for i in staying]
        self.layers = filter_rows(self.layers, staying) if staying else []


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(1, 1400), st.integers(1, 3)),
        st.tuples(st.just("step"), st.integers(1, 290), st.just(1)),
        st.tuples(st.just("leave"), st.integers(0, 9), st.just(1)),
    ),
    max_size=8,
)


@given(steps=STEPS)
@settings(max_examples=examples(25))
def test_rows_attend_to_their_own_last_tokens(steps: list[tuple[str, int, int]]):
    batch = Batch()
    for number, (name, first, count) in enumerate(steps):
        if name == "join":
            batch.join(first, count, 100_000 * number)
        elif batch.lengths and name == "step":
            for _ in range(first):
                batch.step()
        elif batch.lengths:
            batch.leave(first % len(batch.lengths))
        if batch.layers:
            columns = batch.layers[0].keys.shape[2]
            assert columns <= buffer_capacity(1400 + 300)


@pytest.mark.parametrize("chunk", [1, 7, 128, 500])
def test_prompt_in_chunks_attends_like_mlx_vlms_rotating_cache(chunk: int):
    ours, theirs = WindowKVCache(WINDOW), RotatingKVCache(WINDOW)
    for start in range(0, 1500, chunk):
        rows = [range(start, min(start + chunk, 1500))]
        mine, reference = seen(ours, rows), seen(theirs, rows)
        assert mine == [[sorted(keys) for keys in row] for row in reference]
    assert ours.keys.shape[2] <= buffer_capacity(WINDOW + chunk)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_window_cache_drops_rejected_drafts(num_rows: int):
    batch = Batch()
    for row in range(num_rows):
        batch.join(700 + 40 * row, 1, 100_000 * row)
    for _ in range(40):
        batch.step(16)
        layer = batch.layers[0]
        if isinstance(layer, RowsKVCache):
            cuts = [(5 * row) % 16 for row in range(num_rows)]
            layer.cut(cuts)
        else:
            cuts = [11]
            layer.trim(11)
        batch.lengths = [
            (start, count - cut) for (start, count), cut in zip(batch.lengths, cuts, strict=True)
        ]
    batch_cache.even_out(batch.layers)
    batch.step()


def test_extracted_row_keeps_only_its_window():
    batch = Batch()
    batch.join(900, 1, 0)
    batch.join(50, 1, 100_000)
    for row, (start, count) in enumerate(batch.lengths):
        alone = batch.layers[0].extract(row)
        assert isinstance(alone, WindowKVCache)
        assert alone.offset == count
        assert alone.keys.shape[2] == min(count, WINDOW - 1)
        new = range(start + count, start + count + 1)
        first = max(start, start + count - WINDOW + 1)
        assert seen(alone, [new]) == [[list(range(first, start + count + 1))]]
