"""The KV caches of a batch of sequences.

A sequence that decodes alone stays on the plain cache of its prompt: no copy, no mask, and each
family's fastest path. Unlike in mlx-vlm's batched KV cache, the host knows all paddings.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_vlm.models.cache import BatchKVCache, KVCache

from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.runner.backends.rows import Run, arrange
from vlm_server.runner.device.arrays import to_numpy
from vlm_server.runner.kv.layers import can_batch, empty_layer, storage_of
from vlm_server.runner.kv.packed_cache import Plain, packs, plain_of, unpacks
from vlm_server.runner.kv.window_cache import WindowKVCache, buffer_capacity

SequenceLayer: TypeAlias = KVCache | WindowKVCache
"""A layer of one sequence that appends."""


def join(running: list[Any], num_running: int, prompt: list[Any], count: int) -> list[Any]:
    """The layers of `num_running` rows followed by `count` rows of one prompt's layers.

    The arguments are not changed. `prompt` itself is returned if it is to be the only row.
    """
    if num_running == 0 and count == 1:
        return prompt
    new_rows = [_as_rows(layer, count) for layer in prompt]
    return new_rows if num_running == 0 else _extend(running, num_running, new_rows)


def branch(prompt: list[Any], count: int) -> list[Any]:
    """`count` rows of one prompt's layers, which are copied; one at a time if `can_batch` fails.

    One row is a copy of the prompt's own layers.
    """
    if count == 1:
        return copy.deepcopy(prompt)
    assert can_batch(prompt)
    return [
        RowsKVCache.copies(layer, count)
        if isinstance(layer, SequenceLayer)
        else type(layer).merge([layer] * count)
        for layer in prompt
    ]


def join_rows(
    running: list[Any], num_running: int, prompts: list[RowsKVCache], rows: list[int]
) -> list[Any]:
    """The layers of `num_running` rows followed by these `rows` of `prompts`; all end evenly.

    A row may occur several times. The arguments are not changed.
    """
    new_rows = [copy.copy(layer) for layer in prompts]
    if rows != list(range(len(prompts[0].ends))):
        for layer in new_rows:
            layer.keep(rows)
    even_out(new_rows)
    return new_rows if num_running == 0 else _extend(running, num_running, new_rows)


def _extend(running: list[Any], num_running: int, new_rows: list[Any]) -> list[Any]:
    is_single = num_running == 1
    rows = [_as_rows(layer, 1) if is_single else copy.copy(layer) for layer in running]
    for layer, new_layer in zip(rows, new_rows, strict=True):
        layer.extend(new_layer)
    return rows


def filter_rows(running: list[Any], rows: list[int]) -> list[Any]:
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


def detach_rows(running: list[Any], rows: list[int]) -> list[Any]:
    """The layers of `rows` of the two or more in `running`, which is not changed."""
    layers: list[Any] = []
    for count, row in enumerate(rows):
        layers = join(layers, count, [layer.extract(row) for layer in running], 1)
    return layers


def reattach_rows(
    running: list[Any], num_running: int, detached_layers: list[Any], count: int
) -> list[Any]:
    """The layers of `num_running` rows followed by `count` rows that were detached."""
    if num_running == 0:
        return detached_layers
    if count == 1:
        return join(running, num_running, detached_layers, 1)
    for row in range(count):
        row_layers = [layer.extract(row) for layer in detached_layers]
        running = join(running, num_running + row, row_layers, 1)
    return running


def even_out(running: list[Any]) -> None:
    """Make all rows of the layers end at the same column."""
    for layer in running:
        if isinstance(layer, RowsKVCache):
            layer.even_out()


def bounds_of(layer: SequenceLayer | RowsKVCache) -> list[tuple[int, int]]:
    """Each row's first column, negative if it was dropped, and the column after its last."""
    if isinstance(layer, RowsKVCache):
        return list(zip(layer.paddings, layer.ends, strict=True))
    if isinstance(layer, WindowKVCache):
        return [(-layer.num_dropped, layer.end)]
    return [(0, layer.offset)]


def make_room(layer: SequenceLayer | RowsKVCache, count: int) -> None:
    """Make room for `count` more tokens of each row, and at least `KVCache.step` columns in all."""
    if isinstance(layer, RowsKVCache | WindowKVCache):
        layer.make_room(count)
    elif max(layer.offset + count, KVCache.step) > layer.keys.shape[2]:
        runs, capacity = [Run(0, 1, 0, layer.offset)], buffer_capacity(layer.offset + count)
        layer.keys, layer.values = arrange([(layer.keys, layer.values)], runs, capacity)


def advance(layer: SequenceLayer | RowsKVCache, count: int) -> None:
    """Count `count` new tokens of each row, already written into the buffers of `layer`."""
    if isinstance(layer, RowsKVCache):
        layer.advance(count)
    else:
        layer.offset += count


def _as_rows(layer: Any, count: int) -> Any:
    """`count` equal rows of one sequence's cache; one row shares its arrays."""
    if not isinstance(layer, SequenceLayer):
        return type(layer).merge([layer] * count)
    if count == 1:
        return RowsKVCache.of(layer)
    return RowsKVCache.copies(layer, count)


class RowsKVCache(BatchKVCache):  # type: ignore[misc]  # mlx-vlm is not typed
    """One layer of a batch, a row for each sequence; `merge`, `prepare` and `trim` don't fit it.

    keys, values: (rows, heads, capacity, head size), or packed as `storage` says. Row i's tokens
    are columns `paddings[i]` to `ends[i]`: rows are padded on the left to end evenly, until `cut`
    removes tokens of some. Capacity grows by `step` columns at a time. Where a layer has a window
    of `max_size` tokens, the first columns are dropped from time to time: the padding of a row that
    lost tokens is negative.
    """

    def __init__(
        self,
        keys: mx.array,
        values: mx.array,
        paddings: list[int],
        ends: list[int],
        max_size: int | None = None,
        storage: KVStorage = EXACT,
        plain: Plain | None = None,
    ) -> None:
        self.plain = plain
        self.keys, self.values, self.max_size = keys, values, max_size
        self.storage = storage
        self._right_padding = None
        self._left_padding: mx.array | None = None
        self._set_rows(paddings, ends)

    @classmethod
    def of(cls, cache: SequenceLayer) -> RowsKVCache:
        """The arrays of `cache` as one row."""
        [(start, end)] = bounds_of(cache)
        max_size = getattr(cache, "max_size", None)
        storage, plain = storage_of(cache), plain_of(cache)
        return cls(cache.keys, cache.values, [start], [end], max_size, storage, plain)

    @classmethod
    def copies(cls, cache: SequenceLayer, count: int) -> RowsKVCache:
        """`count` copies of `cache`, (1, heads, tokens, head size), as rows."""
        rows = cls.of(cache)
        [start], [end] = rows.paddings, rows.ends
        rows._arrange([Run(0, 1, 0, end)] * count, buffer_capacity(end))
        rows._set_rows([start] * count, [end] * count)
        return rows

    @classmethod
    def take_over(cls, cache: SequenceLayer) -> RowsKVCache:
        """The arrays of `cache` as one row. Until `give_back`, `cache` has none: MLX would copy."""
        rows = cls.of(cache)
        cache.keys = cache.values = None
        return rows

    def give_back(self, cache: SequenceLayer) -> None:
        """Return the present arrays of the only row to `cache`."""
        cache.keys, cache.values = self.keys, self.values
        cache.offset = self._idx - self.paddings[0]
        if isinstance(cache, WindowKVCache):
            cache.num_dropped = -self.paddings[0]

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

    @property
    def first_seen(self) -> int:
        """The first column that the next token of some row attends to."""
        return 0 if self.max_size is None else max(min(self.ends) - self.max_size + 1, 0)

    def make_mask(self, N: int, window_size: int | None = None, **_: Any) -> mx.array | None:
        """(rows, 1, N, columns from `first_seen` on) bool: those that `N` new tokens attend to.

        None, which is cheaper, if one new token of each row attends to all columns.
        """
        window_size, first = window_size or self.max_size, self.first_seen
        is_all = self._are_even and max(self.paddings) <= first
        if N == 1 and is_all and (window_size is None or self._idx - first < window_size):
            return None
        columns = mx.arange(first, self._idx + N)
        last = mx.array(self.ends)[:, None] + mx.arange(N)
        last = last[:, None, :, None]
        mask: mx.array = (columns <= last) & (columns >= self.left_padding[:, None, None, None])
        if window_size is not None:
            mask &= columns > last - window_size
        return mask

    def make_room(self, count: int) -> None:
        """Make room for `count` more tokens; drops the columns before `first_seen` if it must."""
        if max(self._idx + count, self.step) <= self.keys.shape[2]:
            return
        first, num_rows = self.first_seen, len(self.ends)
        length = self._idx - first
        self._arrange([Run(0, num_rows, first, length)], buffer_capacity(length + count))
        self._move(-first)

    @packs
    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append `keys` and `values`, (rows, heads, tokens, head size).

        Returns the columns from `first_seen` on.
        """
        count = keys.shape[2]
        self.make_room(count)
        first, start, end = self.first_seen, self._idx, self._idx + count
        if self._are_even:
            self.keys[..., start:end, :] = keys
            self.values[..., start:end, :] = values
        else:
            rows = mx.arange(len(self.ends))[:, None]
            columns = mx.array(self.ends)[:, None] + mx.arange(count)
            self.keys[rows, :, columns] = keys.transpose(0, 2, 1, 3)
            self.values[rows, :, columns] = values.transpose(0, 2, 1, 3)
        self.advance(count)
        self._fetched_from = first
        return self.keys[..., first:end, :], self.values[..., first:end, :]

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
        starts = [max(padding, 0) for padding in self.paddings]
        lengths = [end - start for start, end in zip(starts, self.ends, strict=True)]
        longest = max(lengths)
        rows = enumerate(zip(starts, lengths, strict=True))
        runs = [Run(row, 1, start, length, longest - length) for row, (start, length) in rows]
        self._arrange(runs, buffer_capacity(longest))
        bounds = zip(self.paddings, self.ends, strict=True)
        self._set_rows(
            [padding + longest - end for padding, end in bounds], [longest] * len(lengths)
        )

    @property
    @unpacks
    def state(self) -> tuple[mx.array, mx.array]:
        """Keys and values of the columns in use, as the last `update_and_fetch` returned them."""
        columns = slice(self._fetched_from, self._idx)
        return self.keys[..., columns, :], self.values[..., columns, :]

    def filter(self, batch_indices: mx.array) -> None:
        """The same as `keep`, by mlx-vlm's name."""
        self.keep(to_numpy(batch_indices).tolist())

    def keep(self, rows: list[int]) -> None:
        """Keep `rows`, in that order, and drop padding that all of them have.

        Runs of neighbours are one copy: gathering single rows is slower on a GPU.
        """
        surplus = max(min(self._first_kept(row) for row in rows), 0)
        capacity = self.keys.shape[2] - surplus
        runs = [Run(start, end - start, surplus, capacity) for start, end in _runs(rows)]
        self._arrange(runs, capacity)
        self._set_rows([self.paddings[row] for row in rows], [self.ends[row] for row in rows])
        self._move(-surplus)

    def extract(self, idx: int) -> SequenceLayer:
        """Row `idx` alone."""
        start, end = max(self._first_kept(idx), 0), self.ends[idx]
        cache = empty_layer(self.max_size, self.storage)
        cache.offset = end - self.paddings[idx]
        if isinstance(cache, WindowKVCache):
            cache.num_dropped = start - self.paddings[idx]
        cache.plain = self.plain
        runs = [Run(idx, 1, start, end - start)]
        cache.keys, cache.values = arrange([(self.keys, self.values)], runs, end - start)
        return cache

    def _first_kept(self, row: int) -> int:
        """The first column that a row alone must keep; negative if that was dropped."""
        if self.max_size is None:
            return self.paddings[row]
        return max(self.paddings[row], self.ends[row] - self.max_size + 1)

    def extend(self, other: RowsKVCache) -> None:
        """Append the rows of `other`, and make all end at the same column."""
        length = max(self._idx, other._idx)
        sources = [(rows.keys, rows.values) for rows in (self, other)]
        runs = [
            Run(row, num_rows, 0, end, length - end, source)
            for source, rows in enumerate((self, other))
            for row, num_rows, end in rows._even_rows()
        ]
        self.keys, self.values = arrange(sources, runs, buffer_capacity(length))
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
        self.keys, self.values = arrange([(self.keys, self.values)], runs, capacity)

    def _set_rows(self, paddings: list[int], ends: list[int]) -> None:
        self.paddings = paddings
        self._left_padding = None
        self._fetched_from = 0
        self._set_ends(ends)

    def _move(self, columns: int) -> None:
        """Count that all rows begin and end `columns` later."""
        paddings = [padding + columns for padding in self.paddings]
        self._set_rows(paddings, [end + columns for end in self.ends])

    def _set_ends(self, ends: list[int]) -> None:
        self.ends, self._idx = ends, max(ends)
        self._are_even = min(ends) == self._idx


def _runs(rows: list[int]) -> list[tuple[int, int]]:
    """`rows` as runs of neighbours, each (first, last + 1)."""
    starts = [i for i, row in enumerate(rows) if i == 0 or row != rows[i - 1] + 1]
    pieces = [rows[start:end] for start, end in pairwise([*starts, len(rows)])]
    return [(piece[0], piece[-1] + 1) for piece in pieces]


def counters(cache: list[Any]) -> list[mx.array]:
    """The layers' own counters: left lazy, they would keep the operations of all steps."""
    offsets = (vars(layer).get("offset") for layer in cache)
    return [counter for counter in offsets if isinstance(counter, mx.array)]
