"""The KV caches of a batch of sequences.

A sequence that decodes alone stays on the plain cache of its prompt: no copy, no mask, and each
family's fastest path. Unlike in mlx-vlm's batched KV cache, the host knows all paddings.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx_vlm.models.cache import BatchKVCache, KVCache

from vlm_server.runner.backends.rows import Run, arranged
from vlm_server.runner.device.arrays import read


def joined(running: list[Any], num_running: int, prompt: list[Any], count: int) -> list[Any]:
    """The layers of `num_running` rows followed by `count` rows of one prompt's layers.

    The arguments are not changed. `prompt` itself is returned if it is to be the only row.
    """
    if num_running == 0 and count == 1:
        return prompt
    new = [_as_rows(layer, count) for layer in prompt]
    return new if num_running == 0 else _extended(running, num_running, new)


def joined_rows(
    running: list[Any], num_running: int, prompts: list[RowsKVCache], rows: list[int]
) -> list[Any]:
    """The layers of `num_running` rows followed by these `rows` of `prompts`; all end evenly.

    A row may occur several times. The arguments are not changed.
    """
    new = [copy.copy(layer) for layer in prompts]
    if rows != list(range(len(prompts[0].ends))):
        for layer in new:
            layer.keep(rows)
    even_out(new)
    return new if num_running == 0 else _extended(running, num_running, new)


def _extended(running: list[Any], num_running: int, new: list[Any]) -> list[Any]:
    one = num_running == 1
    rows = [_as_rows(layer, 1) if one else copy.copy(layer) for layer in running]
    for layer, others in zip(rows, new, strict=True):
        layer.extend(others)
    return rows


def filtered(running: list[Any], rows: list[int]) -> list[Any]:
    """The layers of `rows`, at least one, of the two or more in `running`, which may change."""
    if len(rows) == 1:
        return [layer.extract(rows[0]) for layer in running]
    indices = mx.array(rows)
    for layer in running:
        if isinstance(layer, RowsKVCache):
            layer.keep(rows)
        else:
            layer.filter(indices)
    return running


def detached(running: list[Any], rows: list[int]) -> list[Any]:
    """The layers of `rows` of the two or more in `running`, which is not changed."""
    made: list[Any] = []
    for count, row in enumerate(rows):
        made = joined(made, count, [layer.extract(row) for layer in running], 1)
    return made


def reattached(running: list[Any], num_running: int, others: list[Any], count: int) -> list[Any]:
    """The layers of `num_running` rows followed by `count` rows that were detached."""
    if num_running == 0:
        return others
    if count == 1:
        return joined(running, num_running, others, 1)
    for row in range(count):
        alone = [layer.extract(row) for layer in others]
        running = joined(running, num_running + row, alone, 1)
    return running


def even_out(running: list[Any]) -> None:
    """Make all rows of the layers end at the same column."""
    for layer in running:
        if isinstance(layer, RowsKVCache):
            layer.even_out()


def bounds_of(layer: KVCache | RowsKVCache) -> list[tuple[int, int]]:
    """Each row's first column and the column after its last."""
    if isinstance(layer, RowsKVCache):
        return list(zip(layer.paddings, layer.ends, strict=True))
    return [(0, layer.offset)]


def make_room(layer: KVCache | RowsKVCache, count: int) -> None:
    """Make room for `count` more tokens of each row, and at least `KVCache.step` columns in all."""
    end = max(end for _, end in bounds_of(layer))
    if max(end + count, KVCache.step) > layer.keys.shape[2]:
        capacity = RowsKVCache.capacity(end + count)
        all_rows = Run(0, layer.keys.shape[0], 0, end)
        layer.keys, layer.values = arranged([(layer.keys, layer.values)], [all_rows], capacity)


def advance(layer: KVCache | RowsKVCache, count: int) -> None:
    """Count `count` new tokens of each row, already written into the buffers of `layer`."""
    if isinstance(layer, RowsKVCache):
        layer.advance(count)
    else:
        layer.offset += count


def _as_rows(layer: Any, count: int) -> Any:
    """`count` equal rows of one sequence's plain cache; one row shares its arrays."""
    if type(layer) is KVCache:
        if count == 1:
            return RowsKVCache(layer.keys, layer.values, [0], [layer.offset])
        return RowsKVCache.copies(layer, count)
    return type(layer).merge([layer] * count)


class RowsKVCache(BatchKVCache):  # type: ignore[misc]  # mlx-vlm is not typed
    """One layer of a batch, a row for each sequence; `merge`, `prepare` and `trim` don't fit it.

    keys, values: (rows, heads, capacity, head size). Row i's tokens are columns `paddings[i]` to
    `ends[i]`: rows are padded on the left to end evenly, until `cut` removes tokens of some.
    Capacity grows by `step` columns at a time.
    """

    def __init__(
        self, keys: mx.array, values: mx.array, paddings: list[int], ends: list[int]
    ) -> None:
        self.keys, self.values = keys, values
        self._right_padding = None
        self._left_padding: mx.array | None = None
        self._set_rows(paddings, ends)

    @classmethod
    def copies(cls, cache: KVCache, count: int) -> RowsKVCache:
        """`count` copies of `cache`, (1, heads, tokens, head size), as rows."""
        length = cache.offset
        runs = [Run(0, 1, 0, length)] * count
        keys, values = arranged([(cache.keys, cache.values)], runs, cls.capacity(length))
        return cls(keys, values, [0] * count, [length] * count)

    @classmethod
    def taking(cls, cache: KVCache) -> RowsKVCache:
        """The arrays of `cache` as one row. Until `give_back`, `cache` has none: MLX would copy."""
        keys, values, cache.keys, cache.values = cache.keys, cache.values, None, None
        return cls(keys, values, [0], [cache.offset])

    def give_back(self, cache: KVCache) -> None:
        """Return the present arrays of the only row to `cache`."""
        cache.keys, cache.values, cache.offset = self.keys, self.values, self._idx

    @property
    def left_padding(self) -> mx.array:
        """(rows,) int32: `paddings`, for models that are not compiled."""
        if self._left_padding is None:
            self._left_padding = mx.array(self.paddings)
        return self._left_padding

    @property
    def offset(self) -> mx.array:
        """(rows,) int32: the number of tokens of each row."""
        return (self._idx if self._are_even else mx.array(self.ends)) - self.left_padding

    def make_mask(self, N: int, window_size: int | None = None, **_: Any) -> mx.array | None:
        """(rows, 1, N, columns) bool: the columns that each of `N` new tokens attends to.

        None, which is cheaper, if one new token of each row attends to all columns.
        """
        is_all = self._are_even and not any(self.paddings)
        if N == 1 and window_size is None and is_all:
            return None
        columns = mx.arange(self._idx + N)
        last = mx.array(self.ends)[:, None] + mx.arange(N)
        last = last[:, None, :, None]
        mask: mx.array = (columns <= last) & (columns >= self.left_padding[:, None, None, None])
        if window_size is not None:
            mask &= columns > last - window_size
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys` and `values`, (rows, heads, tokens, head size). Returns all columns."""
        count = keys.shape[2]
        make_room(self, count)
        start, end = self._idx, self._idx + count
        if self._are_even:
            self.keys[..., start:end, :] = keys
            self.values[..., start:end, :] = values
        else:
            rows = mx.arange(len(self.ends))[:, None]
            columns = mx.array(self.ends)[:, None] + mx.arange(count)
            self.keys[rows, :, columns] = keys.transpose(0, 2, 1, 3)
            self.values[rows, :, columns] = values.transpose(0, 2, 1, 3)
        self.advance(count)
        return self.keys[..., :end, :], self.values[..., :end, :]

    def advance(self, count: int) -> None:
        """Count `count` new tokens of every row."""
        self._set_ends([end + count for end in self.ends])

    def cut(self, counts: list[int]) -> None:
        """Remove the last `counts` tokens of each row."""
        self._set_ends([end - count for end, count in zip(self.ends, counts, strict=True)])

    def even_out(self) -> None:
        """Make all rows end at the same column again, by a copy."""
        if self._are_even:
            return
        lengths = [end - padding for padding, end in zip(self.paddings, self.ends, strict=True)]
        longest = max(lengths)
        rows = enumerate(zip(self.paddings, lengths, strict=True))
        runs = [Run(row, 1, start, length, longest - length) for row, (start, length) in rows]
        self._arrange(runs, self.capacity(longest))
        self._set_rows([longest - n for n in lengths], [longest] * len(lengths))

    @property
    def state(self) -> tuple[mx.array, mx.array]:
        """Keys and values of the columns in use."""
        return self.keys[..., : self._idx, :], self.values[..., : self._idx, :]

    def filter(self, batch_indices: mx.array) -> None:
        """The same as `keep`, by mlx-vlm's name."""
        self.keep(read(batch_indices).tolist())

    def keep(self, rows: list[int]) -> None:
        """Keep `rows`, in that order, and drop padding that all of them have.

        Runs of neighbours are one copy: gathering single rows is slower on a GPU.
        """
        surplus = min(self.paddings[row] for row in rows)
        capacity = self.keys.shape[2] - surplus
        runs = [Run(start, end - start, surplus, capacity) for start, end in _runs(rows)]
        self._arrange(runs, capacity)
        paddings, ends = (
            [columns[row] - surplus for row in rows] for columns in (self.paddings, self.ends)
        )
        self._set_rows(paddings, ends)

    def extract(self, idx: int) -> KVCache:
        """Row `idx` alone."""
        cache = KVCache()
        cache.offset = self.ends[idx] - self.paddings[idx]
        alone = Run(idx, 1, self.paddings[idx], cache.offset)
        cache.keys, cache.values = arranged([(self.keys, self.values)], [alone], cache.offset)
        return cache

    def extend(self, other: RowsKVCache) -> None:
        """Append the rows of `other`, and make all end at the same column."""
        length = max(self._idx, other._idx)
        sources = [(rows.keys, rows.values) for rows in (self, other)]
        runs = [
            Run(row, num_rows, 0, end, length - end, source)
            for source, rows in enumerate((self, other))
            for row, num_rows, end in rows._even_rows()
        ]
        self.keys, self.values = arranged(sources, runs, self.capacity(length))
        paddings = [
            padding + length - end
            for rows in (self, other)
            for padding, end in zip(rows.paddings, rows.ends, strict=True)
        ]
        self._set_rows(paddings, [length] * len(paddings))

    def _even_rows(self) -> list[tuple[int, int, int]]:
        """Runs of rows with one end: (first row, number of rows, end)."""
        if self._are_even:
            return [(0, len(self.ends), self._idx)]
        return [(row, 1, end) for row, end in enumerate(self.ends)]

    def _arrange(self, runs: list[Run], capacity: int) -> None:
        self.keys, self.values = arranged([(self.keys, self.values)], runs, capacity)

    def _set_rows(self, paddings: list[int], ends: list[int]) -> None:
        self.paddings = paddings
        self._left_padding = None
        self._set_ends(ends)

    def _set_ends(self, ends: list[int]) -> None:
        self.ends, self._idx = ends, max(ends)
        self._are_even = min(ends) == self._idx

    @classmethod
    def capacity(cls, length: int) -> int:
        """Columns for `length` tokens and at least one more."""
        return int((length // cls.step + 1) * cls.step)


def _runs(rows: list[int]) -> list[tuple[int, int]]:
    """`rows` as runs of neighbours, each (first, last + 1)."""
    starts = [i for i, row in enumerate(rows) if i == 0 or row != rows[i - 1] + 1]
    pieces = [rows[start:end] for start, end in pairwise([*starts, len(rows)])]
    return [(piece[0], piece[-1] + 1) for piece in pieces]
