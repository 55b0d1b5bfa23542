"""The state of a model's layers that the prefix cache stores, and from which sequences start.

A layer that only appends (`KVCache`) can be cut after any token: its keys and values are stored as
segments, exactly or quantized. Other layers, with a window or a recurrent state, are stored as a
snapshot after one token, always exactly. Both are copied when used, and when stored unless no
sequence runs on the buffers any more: stored state is never shared with a running sequence, and
takes no more memory than its `size_bytes`, except as described at `_copy`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, Self

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.models.cache import ArraysCache, CacheList, KVCache, PoolingCache

from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.interfaces import PrefixState
from vlm_server.runner.kv.batch_cache import RowsKVCache
from vlm_server.runner.kv.layers import storage_of
from vlm_server.runner.kv.quantization import dequantized, quantize_in_blocks, row_bytes
from vlm_server.runner.kv.window_cache import WindowKVCache, buffer_capacity

_MIN_STORED_SHARE = 0.75
"""Minimum share of a buffer to be stored for which all of it is stored without a copy."""

_NUM_UNPACKED = 2
"""Packed layers that a step has unpacked at once: one is computed while the next is launched."""


@dataclass(frozen=True, slots=True)
class KVSegment:
    """Keys and values of some tokens, each (1, heads, tokens, head size), of each `KVCache`.

    `arrays`: these, or the two arrays of each that is quantized. `buffer_bytes`: the size of the
    larger buffers that the arrays are views of; else 0.
    """

    arrays: tuple[mx.array, ...]
    buffer_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return self.buffer_bytes or sum(array.nbytes for array in self.arrays)

    def split(self, at: int) -> tuple[Self, Self]:
        """Copies of the first `at` tokens, and of the rest."""
        first = _copy_arrays([array[:, :, :at] for array in self.arrays])
        rest = _copy_arrays([array[:, :, at:] for array in self.arrays])
        mx.eval(first, rest)
        return type(self)(first), type(self)(rest)


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The state and counters, after one token, of each layer that is no `KVCache`."""

    arrays: tuple[tuple[mx.array | None, ...], ...]
    counters: tuple[tuple[str, ...], ...]

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for layer in self.arrays for array in layer if array is not None)


class SequenceState:
    """The `Source` of one sequence: its own layers, or row `row` of a batch's.

    snapshots: by the number of tokens before them. is_unused: whether no sequence runs on the
    layers any more, so that mostly used buffers are stored without a copy.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        snapshots: Mapping[int, LayerStates],
        row: int = 0,
        *,
        is_unused: bool = False,
    ) -> None:
        self._layers = [layer for layer in layers if _can_be_cut(layer)]
        self._row = row
        self._is_unused = is_unused
        self._snapshots = snapshots
        self._storage = EXACT
        self._waits_for_copy = False

    def stored_as(self, storage: KVStorage, *, waits_for_copy: bool = False) -> Self:
        """Let `take` quantize as `storage` says; returns this source.

        waits_for_copy: whether `take` waits until its copies are made, where errors come late.
        """
        self._storage, self._waits_for_copy = storage, waits_for_copy
        return self

    @property
    def snapshots(self) -> Mapping[int, LayerStates]:
        """Evaluated: the disk's thread uses them too, and only one thread may wait for an array."""
        mx.eval([snapshot.arrays for snapshot in self._snapshots.values()])
        return self._snapshots

    def size_bytes(self, start: int, end: int) -> int:
        return self._buffer_bytes(start, end) or self._kv_bytes(end - start)

    def take(self, start: int, end: int) -> KVSegment:
        sides, buffer_bytes = [], self._buffer_bytes(start, end)
        for layer in self._layers:
            padding = layer.paddings[self._row] if isinstance(layer, RowsKVCache) else 0
            columns = slice(padding + start, padding + end)
            both = _sides_of(layer)
            sides += [side[self._row : self._row + 1, :, columns] for side in both]
        if buffer_bytes:
            arrays = tuple(sides)
        else:
            stored = (quantize_in_blocks(side, self._storage) for side in sides)
            arrays = tuple(chain.from_iterable(stored))
        if self._waits_for_copy:
            mx.eval(arrays)
        else:
            mx.async_eval(arrays)  # type: ignore[no-untyped-call]
        return KVSegment(arrays, buffer_bytes)

    def _kv_bytes(self, num_tokens: int) -> int:
        sides = (side for layer in self._layers for side in _sides_of(layer))
        per_token = sum(
            side.shape[1] * row_bytes(side.shape[3], side.dtype, self._storage) for side in sides
        )
        return int(per_token * num_tokens)

    def _buffer_bytes(self, start: int, end: int) -> int:
        """Size of the whole buffers if they are to be stored without a copy; else 0."""
        if not (self._is_unused and self._layers and self._storage.is_exact):
            return 0
        capacity = self._layers[0].keys.shape[2]
        return self._kv_bytes(capacity) if end - start >= _MIN_STORED_SHARE * capacity else 0


class StateSize:
    """The size of a sequence's layers by its number of tokens, learned from one prompt."""

    def __init__(self, layers: Sequence[Any], num_tokens: int) -> None:
        self._fixed_bytes = 0
        self._unpacked_bytes = 0
        """Bytes of a token in the layers that a step has unpacked at once, of packed ones."""
        self._token_bytes: Counter[int | None] = Counter()
        """Bytes of a token, by the maximum number of tokens of the layers; None for no maximum."""
        plain = [layer for layer in layers if _can_be_cut(layer) and layer.keys is not None]
        self._sides = [(side.shape, side.dtype) for layer in plain for side in _sides_of(layer)]
        """Shape and type of the keys and values that are stored as segments."""
        for layer in layers:
            self._add(layer, num_tokens)

    def _add(self, layer: Any, num_tokens: int) -> None:
        if isinstance(layer, KVCache | WindowKVCache):
            if layer.keys is not None:  # else it shares another layer's
                _, heads, _, size = layer.keys.shape
                num_bytes = heads * (size + layer.values.shape[3]) * layer.keys.dtype.size
                self._token_bytes[getattr(layer, "max_size", None)] += num_bytes
                if not storage_of(layer).is_exact:
                    plain_bytes = _NUM_UNPACKED * heads * layer.plain.row_bytes
                    self._unpacked_bytes = max(self._unpacked_bytes, plain_bytes)
        elif isinstance(layer, ArraysCache):
            self._fixed_bytes += _array_bytes(layer.cache)
        elif isinstance(layer, CacheList):
            before = self._token_bytes[None]
            for each in layer.caches:
                self._add(each, num_tokens)
            num_bytes = self._token_bytes[None] - before
            self._fixed_bytes += num_bytes * KVCache.step  # MLX's own buffers are not rounded
        elif isinstance(layer, PoolingCache):  # a row of `ratio` tokens, and those of the next one
            pool = layer.buf_kv if layer.pooled is None else layer.pooled
            row_bytes = pool.shape[-1] * pool.dtype.size
            self._token_bytes[None] += -(-row_bytes // layer.ratio)
            self._fixed_bytes += 2 * layer.ratio * row_bytes
        else:
            self._token_bytes[None] += _array_bytes(layer.state) // num_tokens

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of a sequence of `num_tokens`, including unused columns of its buffers."""
        capacity = buffer_capacity(num_tokens)
        return (
            self._fixed_bytes
            + capacity * self._unpacked_bytes
            + sum(
                num_bytes * min(capacity, buffer_capacity(max_tokens) if max_tokens else capacity)
                for max_tokens, num_bytes in self._token_bytes.items()
            )
        )

    def stored_bytes_for(self, num_tokens: int, storage: KVStorage) -> int:
        """Bytes of `num_tokens` in the prefix cache, with two snapshots if there are any.

        A conversation continues from one snapshot while the next one is stored.
        """
        snapshot_bytes = self._fixed_bytes + sum(
            num_bytes * min(num_tokens, max_tokens)
            for max_tokens, num_bytes in self._token_bytes.items()
            if max_tokens
        )
        return 2 * snapshot_bytes + num_tokens * sum(
            shape[1] * row_bytes(shape[3], dtype, storage) for shape, dtype in self._sides
        )


def _array_bytes(tree: Any) -> int:
    leaves: Any = tree_flatten(tree)
    return sum(leaf.nbytes for _, leaf in leaves if isinstance(leaf, mx.array))


def snapshot(
    layers: Sequence[Any],
    row: int | None = None,
    *,
    num_after: int = 0,
    states: Iterable[tuple[mx.array, ...]] | None = None,
) -> LayerStates:
    """The states of the layers that can't be cut, of one sequence or of a batch's `row`.

    Of layers of other kinds there is none: no prefix of theirs is stored. num_after: the number of
    tokens of the last chunk after the snapshot. states: those before these, if `has_states`.
    """
    arrays, counters = [], list[tuple[str, ...]]()
    given = None if states is None else iter(states)
    for layer in layers:
        if isinstance(layer, ArraysCache):
            alone = layer if row is None else layer.extract(row)
            arrays.append(_copy_arrays(alone.cache if given is None else next(given)))
            counters.append(())
        elif isinstance(layer, _WINDOWS) and not _can_be_cut(layer):
            window = layer.extract(0, num_after) if num_after else layer.extract(row or 0)  # copied
            arrays.append((window.keys, window.values))
            counters.append(window.meta_state)
    mx.async_eval([a for layer in arrays for a in layer if a is not None])  # type: ignore[no-untyped-call]
    return LayerStates(tuple(arrays), tuple(counters))


_WINDOWS: tuple[Any, ...] = (RowsKVCache, WindowKVCache)
"""Types of layers that may have a window."""


def restore(layers: Sequence[Any], prefix: PrefixState, num_tokens: int) -> None:
    """Copy a stored prefix into the new `layers` of a prompt of `num_tokens`, with room for all."""
    room = buffer_capacity(num_tokens) - prefix.length

    @cache
    def zeros(heads: int, size: int, dtype: mx.Dtype) -> mx.array:
        return mx.zeros((1, heads, room, size), dtype)  # for scales, too: the numbers become 0

    matched = [
        [array[:, :, :count] for array in segment.arrays] for segment, count in prefix.segments
    ]
    joined = []
    for parts in zip(*matched, strict=True):
        _, heads, _, size = parts[0].shape
        joined.append(mx.concatenate([*parts, zeros(heads, size, parts[0].dtype)], axis=2))
    appending = [layer for layer in layers if _can_be_cut(layer)]
    are_packed = any(not storage_of(layer).is_exact for layer in appending)
    sides = joined if are_packed else list(dequantized(joined))
    for layer, keys, values in zip(appending, sides[::2], sides[1::2], strict=True):
        layer.keys, layer.values, layer.offset = keys, values, prefix.length
    states: LayerStates | None = prefix.snapshot
    if states is None:
        return
    stateful = [layer for layer in layers if not _can_be_cut(layer)]
    for layer, arrays, counters in zip(stateful, states.arrays, states.counters, strict=True):
        _put_state(layer, arrays, counters)


def _sides_of(layer: Any) -> tuple[mx.array, mx.array]:
    return layer.keys, layer.values


def _can_be_cut(layer: Any) -> bool:
    if isinstance(layer, RowsKVCache):
        return layer.max_size is None
    return isinstance(layer, KVCache)


def _put_state(layer: Any, arrays: Sequence[mx.array | None], counters: tuple[str, ...]) -> None:
    if isinstance(layer, WindowKVCache):
        layer.keys, layer.values = _copy_arrays(arrays)
        layer.meta_state = counters
    else:
        layer.cache = list(_copy_arrays(arrays))


def _copy_arrays(arrays: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(None if array is None else _copy(array) for array in arrays)


def _copy(array: mx.array) -> mx.array:
    """A copy in a buffer of its own, unless the array is all of its buffer but for some 16 KiB that
    MLX tolerates; then it is copied before anything writes into that buffer."""
    return mx.contiguous(array)
