"""What the prefix cache keeps of a model's layers. Knows mlx-vlm's caches; knows no tree.

A layer that only appends (`KVCache`) can be cut at any token: its keys and values are kept as
segments. Others, with a window or a recurrent state, are kept as a snapshot of one place.
All is copied when it is used, and when it is kept too unless nobody else has it, so that nothing is
shared with a row that runs, and what is kept holds no more memory than it says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_vlm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from vlm_server.cache.caches import Prefix
from vlm_server.runner.kv.batch_cache import RowsKVCache

_MOST = 0.75
"""Of a buffer: so much of it must be worth keeping for the whole of it to be kept."""
_KNOWN = (KVCache, RotatingKVCache, ArraysCache)


@dataclass(frozen=True, slots=True)
class KVSegment:
    """Of some tokens: keys and values, each (1, heads, tokens, head size), of each `KVCache`.

    `buffer_bytes` are those of the buffers that the arrays are part of; 0 if they are their own.
    """

    arrays: tuple[mx.array, ...]
    buffer_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return self.buffer_bytes or sum(array.nbytes for array in self.arrays)

    def split(self, at: int) -> tuple[Self, Self]:
        """The first `at` tokens, and the rest; both are copies."""
        first = _copied([array[:, :, :at] for array in self.arrays])
        rest = _copied([array[:, :, at:] for array in self.arrays])
        return type(self)(first), type(self)(rest)


@dataclass(frozen=True, slots=True)
class LayerStates:
    """After some token: what each layer that is no `KVCache` holds, and its counters."""

    arrays: tuple[tuple[mx.array | None, ...], ...]
    counters: tuple[tuple[str, ...], ...]

    @property
    def size_bytes(self) -> int:
        return sum(array.nbytes for layer in self.arrays for array in layer if array is not None)


class SequenceState:
    """The `Source` of one row: its layers, alone or as row `row` of a batch.

    `snapshots` are those that were taken on the way, by the tokens before them. Layers that
    nobody runs on any more (`are_free`) are kept as they are, if most of them is kept.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        snapshots: Mapping[int, LayerStates],
        row: int = 0,
        *,
        are_free: bool = False,
    ) -> None:
        self._layers = [layer for layer in layers if _can_be_cut(layer)]
        self._row = row
        self._are_free = are_free
        self.snapshots = snapshots

    def size_bytes(self, start: int, end: int) -> int:
        return self._buffer_bytes(start, end) or self._num_bytes(end - start)

    def take(self, start: int, end: int) -> KVSegment:
        if buffer_bytes := self._buffer_bytes(start, end):
            parts = tuple(
                side[:, :, start:end]
                for layer in self._layers
                for side in (layer.keys, layer.values)
            )
            mx.async_eval(parts)  # type: ignore[no-untyped-call]
            return KVSegment(parts, buffer_bytes)
        sides = []
        for layer in self._layers:
            padding = layer.paddings[self._row] if isinstance(layer, RowsKVCache) else 0
            places = slice(padding + start, padding + end)
            both = (layer.keys, layer.values)
            sides += [side[self._row : self._row + 1, :, places] for side in both]
        return KVSegment(_copied(sides))

    def _num_bytes(self, num_tokens: int) -> int:
        sides = (side for layer in self._layers for side in (layer.keys, layer.values))
        per_token = sum(side.shape[1] * side.shape[3] * side.dtype.size for side in sides)
        return int(per_token * num_tokens)

    def _buffer_bytes(self, start: int, end: int) -> int:
        """Size of the whole buffers, if those shall be kept; else 0."""
        if not self._are_free or not self._layers:
            return 0
        capacity = self._layers[0].keys.shape[2]
        return self._num_bytes(capacity) if end - start >= _MOST * capacity else 0


class StateSize:
    """What the layers of a row hold, by its tokens; as those of its first prompt say."""

    def __init__(self, layers: Sequence[Any], num_tokens: int) -> None:
        self._fixed_bytes = 0
        self._token_bytes: Counter[int | None] = Counter()
        """Bytes of a token, of all layers that hold so many tokens at most; None for all."""
        for layer in layers:
            if isinstance(layer, KVCache | RotatingKVCache):
                if layer.keys is not None:  # else it takes another layer's
                    _, heads, _, size = layer.keys.shape
                    num_bytes = heads * (size + layer.values.shape[3]) * layer.keys.dtype.size
                    self._token_bytes[getattr(layer, "max_size", None)] += num_bytes
            elif isinstance(layer, ArraysCache):
                self._fixed_bytes += _num_bytes(layer.cache)
            else:
                self._token_bytes[None] += _num_bytes(layer.state) // num_tokens

    def of(self, num_tokens: int) -> int:
        """Bytes of a row, with the room that buffers have beyond its tokens."""
        capacity = room_for(num_tokens)
        return self._fixed_bytes + sum(
            num_bytes * min(capacity, most or capacity)
            for most, num_bytes in self._token_bytes.items()
        )


def _num_bytes(tree: Any) -> int:
    leaves: Any = tree_flatten(tree)
    return sum(leaf.nbytes for _, leaf in leaves if isinstance(leaf, mx.array))


def room_for(num_tokens: int) -> int:
    """Places of the buffer of a row: for its tokens and at least one more."""
    return int((num_tokens // KVCache.step + 1) * KVCache.step)


def can_store(language_model: Any) -> bool:
    """Whether all layers of this model are of kinds that are known here."""
    return all(type(layer) in _KNOWN for layer in make_prompt_cache(language_model))


def needs_snapshots(language_model: Any) -> bool:
    """Whether some layer can't be cut."""
    return not all(_can_be_cut(layer) for layer in make_prompt_cache(language_model))


def snapshot(layers: Sequence[Any], row: int | None = None) -> LayerStates:
    """The states now of those layers that can't be cut: of a row alone, or of one of a batch."""
    arrays, counters = [], []
    for layer in layers:
        if _can_be_cut(layer):
            continue
        alone = layer if row is None else layer.extract(row)
        arrays.append(_copied_state(alone))
        counters.append(alone.meta_state if isinstance(alone, RotatingKVCache) else ())
    mx.async_eval([a for layer in arrays for a in layer if a is not None])  # type: ignore[no-untyped-call]
    return LayerStates(tuple(arrays), tuple(counters))


def restore(layers: Sequence[Any], prefix: Prefix, num_tokens: int) -> None:
    """Put what was found of a prompt of `num_tokens` into its new `layers`.

    They get room for the rest of it and for some of its answer.
    """
    capacity = room_for(num_tokens)
    cut = [layer for layer in layers if _can_be_cut(layer)]
    pieces = [
        [array[:, :, :count] for array in segment.arrays] for segment, count in prefix.segments
    ]
    sides = list(zip(*pieces, strict=True))
    rooms = _Rooms(capacity - prefix.length)
    for number, layer in enumerate(cut):
        keys, values = sides[2 * number : 2 * number + 2]
        layer.keys = mx.concatenate([*keys, rooms.like(keys[0])], axis=2)
        layer.values = mx.concatenate([*values, rooms.like(values[0])], axis=2)
        layer.offset = prefix.length
    states: LayerStates | None = prefix.snapshot
    if states is None:
        return
    whole = [layer for layer in layers if not _can_be_cut(layer)]
    for layer, arrays, counters in zip(whole, states.arrays, states.counters, strict=True):
        _put_state(layer, arrays, counters)


def _can_be_cut(layer: Any) -> bool:
    return isinstance(layer, KVCache | RowsKVCache)


class _Rooms:
    """Empty places for `num_tokens`, one array for all layers of one shape."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._made: dict[tuple[int, int, mx.Dtype], mx.array] = {}

    def like(self, array: mx.array) -> mx.array:
        """(1, heads, tokens, head size) with the heads of `array`."""
        kind = (array.shape[1], array.shape[3], array.dtype)
        if kind not in self._made:
            self._made[kind] = mx.zeros((1, kind[0], self._num_tokens, kind[1]), kind[2])
        return self._made[kind]


def _copied_state(layer: Any) -> tuple[mx.array | None, ...]:
    held = (layer.keys, layer.values) if isinstance(layer, RotatingKVCache) else layer.cache
    return tuple(None if array is None else _copy(array) for array in held)


def _put_state(layer: Any, arrays: Sequence[mx.array | None], counters: Sequence[str]) -> None:
    copies = [None if array is None else _copy(array) for array in arrays]
    if isinstance(layer, RotatingKVCache):
        layer.keys, layer.values = copies
        layer.meta_state = counters
    else:
        layer.cache = copies


def _copied(arrays: list[mx.array]) -> tuple[mx.array, ...]:
    copies = tuple(map(_copy, arrays))
    mx.async_eval(copies)  # type: ignore[no-untyped-call]
    return copies


def _copy(array: mx.array) -> mx.array:
    """A copy that shares no memory, whatever the layout."""
    return mx.contiguous(array)
