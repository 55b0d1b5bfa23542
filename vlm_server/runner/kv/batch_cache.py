"""The KV caches of sequences that decode together.

A sequence that decodes alone stays on the plain cache of its prompt: no copy, no mask, and each
family's fastest path. mlx-vlm's batched KV cache reads the paddings of every layer from the device
when a sequence leaves, counts an offset on the device in every layer, and masks rows that have no
padding. Here the host knows the paddings.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import BatchKVCache, KVCache


def joined(running: list[Any], num_running: int, prompt: list[Any], count: int) -> list[Any]:
    """The layers of `num_running` rows followed by `count` rows of one prompt's layers.

    The arguments are not changed, except that a prompt that joins no other is returned itself.
    """
    if num_running == 0 and count == 1:
        return prompt
    new = [_as_rows(layer, count) for layer in prompt]
    if num_running == 0:
        return new
    one = num_running == 1
    rows = [_as_rows(layer, 1) if one else copy.copy(layer) for layer in running]
    for layer, others in zip(rows, new, strict=True):
        layer.extend(others)
    return rows


def filtered(running: list[Any], rows: list[int]) -> list[Any]:
    """The layers of only those `rows`, at least one, of the two or more in `running`."""
    if len(rows) == 1:
        return [layer.extract(rows[0]) for layer in running]
    indices = mx.array(rows)
    for layer in running:
        if isinstance(layer, RowsKVCache):
            layer.keep(rows)
        else:
            layer.filter(indices)
    return running


def separated(running: list[Any], rows: list[int]) -> list[Any]:
    """The layers of those `rows` of the two or more in `running`, which is left as it is."""
    made: list[Any] = []
    for count, row in enumerate(rows):
        made = joined(made, count, [layer.extract(row) for layer in running], 1)
    return made


def merged(running: list[Any], num_running: int, others: list[Any], count: int) -> list[Any]:
    """The layers of `num_running` rows, and of `count` others that decoded apart from them."""
    if num_running == 0:
        return others
    if count == 1:
        return joined(running, num_running, others, 1)
    for row in range(count):
        alone = [layer.extract(row) for layer in others]
        running = joined(running, num_running + row, alone, 1)
    return running


def _as_rows(layer: Any, count: int) -> Any:
    """`count` equal rows of one sequence's plain cache."""
    if type(layer) is KVCache:
        return RowsKVCache.copies(layer, count)
    return type(layer).merge([layer] * count)


class RowsKVCache(BatchKVCache):  # type: ignore[misc]  # mlx-vlm is not typed
    """One layer of a batch, a row for each sequence, padded on the left so that all rows end alike.

    Has what models and `DecodeBatch` call; `merge`, `prepare` and `trim` of the base don't fit it.
    keys, values: (rows, heads, capacity, head size), of which the first `_idx` columns are in use;
    row i's tokens begin at column `paddings[i]`. Capacity grows by `step` columns at a time.
    """

    def __init__(self, keys: mx.array, values: mx.array, length: int, paddings: list[int]) -> None:
        self.keys, self.values = keys, values
        self._idx = length
        self._right_padding = None
        self._set_paddings(paddings)

    @classmethod
    def copies(cls, cache: KVCache, count: int) -> RowsKVCache:
        """`count` copies of `cache`, (1, heads, tokens, head size), as rows."""
        length = cache.offset
        sides = (cache.keys, cache.values)
        keys, values = (_resized(array, length, 0, cls._capacity(length)) for array in sides)
        if count > 1:
            keys, values = (mx.repeat(array, count, axis=0) for array in (keys, values))
        return cls(keys, values, length, [0] * count)

    @property
    def offset(self) -> mx.array:
        """(rows,) int32: the number of tokens of each row."""
        return self._idx - self.left_padding

    def make_mask(self, N: int, **kwargs: Any) -> mx.array | None:
        """None, which is cheaper, if one new token of each row attends to all columns."""
        if N == 1 and kwargs.get("window_size") is None and not any(self.paddings):
            return None
        mask: mx.array = super().make_mask(N, **kwargs)
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys` and `values`, (rows, heads, tokens, head size). Returns all there are."""
        start, end = self._idx, self._idx + keys.shape[2]
        if end > self.keys.shape[2]:
            capacity = self._capacity(end)
            self.keys = _resized(self.keys, start, 0, capacity)
            self.values = _resized(self.values, start, 0, capacity)
        self.keys[..., start:end, :] = keys
        self.values[..., start:end, :] = values
        self._idx = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """Keys and values of the columns in use."""
        return self.keys[..., : self._idx, :], self.values[..., : self._idx, :]

    def filter(self, batch_indices: mx.array) -> None:
        """`keep`, as mlx-vlm's caches name it."""
        self.keep(np.array(batch_indices).tolist())

    def keep(self, rows: list[int]) -> None:
        """Keep `rows`, in that order, and drop padding that all of them have.

        Neighbouring rows are copied at once: gathering rows one by one is slower on a GPU.
        """
        paddings = [self.paddings[row] for row in rows]
        surplus = min(paddings)
        runs = _runs(rows)
        self.keys, self.values = (
            mx.concatenate([side[start:end, :, surplus:] for start, end in runs])
            for side in (self.keys, self.values)
        )
        self._idx -= surplus
        self._set_paddings([padding - surplus for padding in paddings])

    def extract(self, idx: int) -> KVCache:
        """Row `idx` alone."""
        cache = KVCache()
        cache.offset = self._idx - self.paddings[idx]
        cache.keys, cache.values = (
            mx.contiguous(array[idx : idx + 1, :, self.paddings[idx] : self._idx])
            for array in (self.keys, self.values)
        )
        return cache

    def extend(self, other: RowsKVCache) -> None:
        """Add the rows of `other` after these."""
        length = max(self._idx, other._idx)
        capacity = self._capacity(length)
        parts = [(rows, length - rows._idx) for rows in (self, other)]
        self.keys = mx.concatenate([_resized(r.keys, r._idx, n, capacity) for r, n in parts])
        self.values = mx.concatenate([_resized(r.values, r._idx, n, capacity) for r, n in parts])
        self._idx = length
        self._set_paddings([padding + n for rows, n in parts for padding in rows.paddings])

    def _set_paddings(self, paddings: list[int]) -> None:
        self.paddings = paddings
        self.left_padding = mx.array(paddings)

    @classmethod
    def _capacity(cls, length: int) -> int:
        """Columns for `length` tokens and at least one more."""
        return int((length // cls.step + 1) * cls.step)


def _runs(rows: list[int]) -> list[tuple[int, int]]:
    """`rows` as runs of neighbours, each (first, last + 1)."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs


def _resized(array: mx.array, length: int, padding: int, capacity: int) -> mx.array:
    """The first `length` columns of axis 2 after `padding` empty ones; `capacity` in all.

    The columns after them are never read.
    """
    if padding == 0 and array.shape[2] == capacity:
        return array
    room = capacity - padding - length
    return mx.pad(array[..., :length, :], [(0, 0), (0, 0), (padding, room), (0, 0)])
