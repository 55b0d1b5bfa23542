"""A layer's KV buffers in a compiled step, with bounds that only the device knows.

On CUDA, our attention writes new tokens into the buffers in place. MLX is not told of the write and
treats the buffers as unchanged. This is safe: each column is written once, and read only after
that. Elsewhere, MLX makes new arrays, which replace the old ones.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

VIEW_TOKENS = KVCache.step
"""Columns of a view; no buffer has fewer."""


def first_columns(layer: Any) -> tuple[mx.array, mx.array]:
    """Views of the first columns of a layer's keys and values, whose shape is always the same."""
    known = vars(layer).get("columns")
    if known is None or known[0] is not layer.keys:
        keys, values = layer.keys, layer.values
        known = layer.columns = keys, keys[:, :, :VIEW_TOKENS], values[:, :, :VIEW_TOKENS]
    return known[1], known[2]


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
    _idx = 1  # the offset that mlx-vlm asks for, only to see whether a prompt begins

    def make_mask(self, *_: Any, **__: Any) -> None:
        """None: attention masks by `bounds`."""


class BoundedLayer(_StepLayer):
    """A layer of a decode step or a prefill chunk.

    keys, values: (rows, heads, capacity, head size). bounds: (rows, 3) int32: each row's first
    column, the column after its last, and the number of them that `update_and_fetch` fills;
    further tokens are padding.
    """

    def __init__(
        self, keys: mx.array, values: mx.array, bounds: mx.array, *, in_place: bool
    ) -> None:
        self.keys, self.values, self.bounds = keys, values, bounds
        self._in_place = in_place

    @property
    def offset(self) -> mx.array:
        """(rows,) int32: the number of tokens of each row before the new ones."""
        return self.bounds[:, 1] - self.bounds[:, 0] - self.bounds[:, 2]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys` and `values`, (rows, heads, tokens, head size). Returns the buffers."""
        num_rows, _, count, _ = keys.shape
        if self._in_place:
            self.new = keys, values
        else:
            rows = mx.arange(num_rows)[:, None]
            columns = (self.bounds[:, 1] - self.bounds[:, 2])[:, None] + mx.arange(count)
            self.keys[rows, :, columns] = keys.transpose(0, 2, 1, 3)
            self.values[rows, :, columns] = values.transpose(0, 2, 1, 3)
        return self.keys, self.values


class MixedLayer(_StepLayer):
    """A layer of a mixed step, in which rows decode and a prompt's chunk is piggybacked.

    To the model, each token is a row of one: those that decode, then the prompt's.
    """

    def __init__(self, rows: BoundedLayer, prompt: BoundedLayer, num_tokens: int) -> None:
        """`num_tokens`: number of the prompt's tokens."""
        self.rows, self.prompt = rows, prompt
        self._num_rows = rows.bounds.shape[0]
        self._num_tokens = num_tokens

    @property
    def offset(self) -> mx.array:
        """(tokens,) int32: the number of tokens before each in its sequence."""
        return mx.concatenate([self.rows.offset, self.prompt.offset + mx.arange(self._num_tokens)])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Record `keys` and `values`, (tokens, heads, 1, head size), and return them."""
        self.new = keys, values
        return keys, values

    def split(self, array: mx.array) -> tuple[mx.array, mx.array]:
        """(tokens, heads, 1, size) as (rows, heads, 1, size) and (1, heads, tokens, size)."""
        return array[: self._num_rows], array[self._num_rows :].transpose(2, 1, 0, 3)
