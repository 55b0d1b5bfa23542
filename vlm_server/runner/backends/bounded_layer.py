"""A layer's cache in a compiled step: KV buffers with bounds, or states, that the device knows.

On CUDA, our attention writes new tokens into the buffers in place. MLX is not told of the write and
treats the buffers as unchanged. This is safe: each column is written once, and read only after
that. Elsewhere, MLX makes new arrays, which replace the old ones.

A prompt's tokens are passed to the model as rows of one token, like those of sequences that decode.
So one pass can have both, and no layer needs a mask. Attention and layers with a state put the
tokens of the prompt together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import ArraysCache, KVCache

VIEW_TOKENS = KVCache.step
"""Columns of a view; no buffer has fewer."""


def first_columns(layer: Any) -> tuple[mx.array, mx.array]:
    """Views of the first columns of a layer's keys and values, whose shape is always the same."""
    columns = vars(layer).get("columns")
    if columns is None or columns[0] is not layer.keys:
        keys, values = layer.keys, layer.values
        columns = layer.columns = keys, keys[:, :, :VIEW_TOKENS], values[:, :, :VIEW_TOKENS]
    return columns[1], columns[2]


def forget_columns(cache: list[Any]) -> None:
    """Drop the views, so that only the layers have their buffers: MLX then writes in place."""
    for layer in cache:
        vars(layer).pop("columns", None)


class _StepLayer(KVCache):  # type: ignore[misc]  # mlx-vlm is not typed
    """A layer of a compiled step, whose buffers have bounds that only the device knows."""

    new: tuple[mx.array, mx.array] | None = None
    """Keys and values of the new tokens, if attention has to write them."""
    was_attended = False
    """Whether attention to all keys was computed."""
    _num_appended = 0
    """The number of tokens of each row that `update_and_fetch` has appended."""
    _idx = 1  # the offset that mlx-vlm asks for, only to see whether a prompt begins

    def make_mask(self, *_: Any, **__: Any) -> None:
        """None: attention masks by `bounds`."""


class BoundedLayer(_StepLayer):
    """A layer of sequences that decode, or of a prompt.

    keys, values: (rows, heads, capacity, head size). bounds: (rows, 3) int32: each row's first
    column, negative if it was dropped, the column after its last, and the number of them that
    `update_and_fetch` fills; further tokens are padding. window: the number of tokens that a token
    attends to, including itself; None for all.
    """

    def __init__(
        self,
        keys: mx.array,
        values: mx.array,
        bounds: mx.array,
        *,
        in_place: bool,
        window: int | None = None,
    ) -> None:
        self.keys, self.values, self.bounds, self.window = keys, values, bounds, window
        self._in_place = in_place

    @property
    def offset(self) -> mx.array:
        """(rows,) int32: the number of tokens of each row so far."""
        return self.bounds[:, 1] - self.bounds[:, 0] - self.bounds[:, 2] + self._num_appended

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` returned, for a later layer that shares it."""
        return self.keys, self.values

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys` and `values`, (rows, heads, tokens, head size). Returns the buffers."""
        num_rows, _, count, _ = keys.shape
        self._num_appended = count
        if self._in_place:
            self.new = keys, values
        else:
            rows = mx.arange(num_rows)[:, None]
            columns = (self.bounds[:, 1] - self.bounds[:, 2])[:, None] + mx.arange(count)
            self.keys[rows, :, columns] = keys.transpose(0, 2, 1, 3)
            self.values[rows, :, columns] = values.transpose(0, 2, 1, 3)
        return self.keys, self.values


class MixedLayer(_StepLayer):
    """A layer of a pass with a prompt's tokens, and perhaps rows that decode before them.

    To the model, each token is a row of one.
    """

    def __init__(self, rows: BoundedLayer | None, prompt: BoundedLayer, num_tokens: int) -> None:
        """`num_tokens`: number of the prompt's tokens."""
        self.rows, self.prompt = rows, prompt
        self._num_rows = 0 if rows is None else rows.bounds.shape[0]
        self._before = prompt.offset + mx.arange(num_tokens)
        if rows is not None:
            self._before = mx.concatenate([rows.offset, self._before])

    @property
    def offset(self) -> mx.array:
        """(tokens,) int32: the number of tokens before each in its sequence, or up to it."""
        return self._before + self._num_appended

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """What `update_and_fetch` returned, for a later layer that shares it."""
        assert self.new is not None
        return self.new

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Record `keys` and `values`, (tokens, heads, 1, head size), and return them."""
        self.new = keys, values
        self._num_appended = 1
        return keys, values

    def split(self, array: mx.array) -> tuple[mx.array, mx.array]:
        """(tokens, heads, 1, size) as (rows, heads, 1, size) and (1, heads, tokens, size)."""
        return array[: self._num_rows], array[self._num_rows :].transpose(2, 1, 0, 3)


class StepStates(ArraysCache):  # type: ignore[misc]  # mlx-vlm is not typed
    """The states of a layer in a compiled step.

    states: (rows, ...) each. num_new: (rows,) int32, the number of tokens of each row that change
    them; None for all.
    """

    def __init__(self, states: Sequence[mx.array], num_new: mx.array | None = None) -> None:
        self.cache = list(states)
        self.lengths = num_new

    def make_mask(self, N: int) -> mx.array | None:
        """(rows, N) bool: the tokens that change the states; None for all."""
        return None if self.lengths is None else mx.arange(N) < self.lengths[:, None]


class MixedStates:
    """The states of a layer of a pass with a prompt's tokens, each of which is a row of one.

    A `StateModule` takes them apart.
    """

    def __init__(
        self,
        rows: StepStates | None,
        prompt: StepStates,
        num_rows: int,
        points: mx.array | None = None,
    ) -> None:
        """points: (points,) int32, ascending: the numbers of the prompt's new tokens after which
        the states are kept, in `parts`; None for none."""
        self.rows, self.prompt, self.num_rows = rows, prompt, num_rows
        self.starts: list[mx.array] = []
        """The first token of each part of the prompt after the first one."""
        self.parts = [prompt]
        """The states of each part. Those of the last one are the prompt's."""
        if points is not None:
            assert prompt.lengths is not None
            self.starts = list(mx.split(points, len(points)))
            edges = [mx.zeros_like(prompt.lengths), *self.starts, prompt.lengths]
            lengths = [end - start for start, end in pairwise(edges)]
            inner = [StepStates(prompt.cache, length) for length in lengths[:-1]]
            prompt.lengths = lengths[-1]
            self.parts = [*inner, prompt]

    def make_mask(self, *_: Any) -> None:
        """None: padding is masked where the states are computed."""
