"""Each row of a batch cache holds its own prompt and steps, through joins and removals."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_vlm.models.cache import KVCache
from numpy.typing import NDArray

from tests.support.whole_run import examples
from vlm_server.runner.kv.batch_cache import RowsKVCache, filter_rows, join

HEADS, SIZE = 2, 3


@dataclass
class Model:
    """The expected (heads, tokens, size) array of each row, beside the layer under test."""

    rows: list[NDArray[np.float32]] = field(default_factory=list)
    layers: list[KVCache | RowsKVCache] = field(default_factory=list)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def join(self, tokens: int, count: int) -> None:
        prompt, content = KVCache(), self._some(1, tokens)
        prompt.update_and_fetch(mx.array(content), mx.array(content + 1))
        self.layers = join(self.layers, len(self.rows), [prompt], count)
        self.rows += [content[0]] * count

    def step(self) -> None:
        new = self._some(len(self.rows), 1)
        self.layers[0].update_and_fetch(mx.array(new), mx.array(new + 1))
        self.rows = [
            np.concatenate([old, n], axis=1) for old, n in zip(self.rows, new, strict=True)
        ]

    def leave(self, row: int) -> None:
        staying = [i for i in range(len(self.rows)) if i != row]
        self.rows = [self.rows[i] for i in staying]
        self.layers = filter_rows(self.layers, staying) if staying else []

    def check(self) -> None:
        if not self.rows:
            return
        layer = self.layers[0]
        assert isinstance(layer, KVCache) == (len(self.rows) == 1)
        keys, values = (np.array(array) for array in layer.state[:2])
        mask = layer.make_mask(1, return_array=False, window_size=None)
        if isinstance(layer, RowsKVCache):
            assert layer.offset.tolist() == [row.shape[1] for row in self.rows]
            assert (mask is None) == (len({row.shape[1] for row in self.rows}) == 1)
        for number, row in enumerate(self.rows):
            start = keys.shape[2] - row.shape[1]
            np.testing.assert_array_equal(keys[number, :, start:], row)
            np.testing.assert_array_equal(values[number, :, start:], row + 1)
            if mask is not None:
                # The mask is for the step to come, which adds a column at the end.
                assert np.array(mask)[number].ravel().tolist() == [False] * start + [True] * (
                    row.shape[1] + 1
                )

    def _some(self, rows: int, tokens: int) -> NDArray[np.float32]:
        return self.random.normal(size=(rows, HEADS, tokens, SIZE)).astype(np.float32)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(1, 600), st.integers(1, 3)),
        st.tuples(st.just("step"), st.integers(1, 9)),
        st.tuples(st.just("leave"), st.integers(0, 9)),
    ),
    max_size=12,
)


@given(steps=STEPS)
@settings(max_examples=examples(60))
def test_batch_cache_rows_hold_their_own_tokens(steps: list[tuple[object, ...]]):
    model = Model()
    for name, *numbers in steps:
        first, *others = (int(str(n)) for n in numbers)
        if name == "join":
            model.join(first, *others)
        elif model.rows and name == "step":
            for _ in range(first):
                model.step()
        elif model.rows:
            model.leave(first % len(model.rows))
        model.check()


def test_join_leaves_running_arrays_unchanged():
    model = Model()
    model.join(5, 2)
    running = model.layers
    before = [np.array(array) for array in running[0].state]
    model.join(9, 1)
    for array, now in zip(before, running[0].state, strict=True):
        np.testing.assert_array_equal(array, np.array(now))


def test_joining_takes_no_memory_but_that_of_new_rows():
    """All layers are evaluated at once: any intermediate copy would be one of the whole batch."""
    num_layers, tokens = 4, 5000
    prompts = [[KVCache() for _ in range(num_layers)] for _ in range(2)]
    for number, prompt in enumerate(prompts):
        for layer in prompt:
            content = mx.ones((1, 4, tokens - number, 64))
            layer.update_and_fetch(content, content)
    mx.eval([layer.state for prompt in prompts for layer in prompt])
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    rows = join(prompts[0], 1, prompts[1], 1)
    mx.eval([layer.state for layer in rows])
    held = mx.get_active_memory() - before
    assert held >= num_layers * 2 * 2 * 4 * tokens * 64 * 4
    assert mx.get_peak_memory() - before <= 1.01 * held
