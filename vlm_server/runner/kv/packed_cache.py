"""Layers of running sequences that hold keys and values with 8 or 4 bits.

New keys and values are packed as they are appended, and all are unpacked when attention fetches
them, the new ones too. So each token attends to the same numbers in whatever chunk, batch or step
it is computed, and after a prefix from the cache, which stores the packed arrays as they are. Only
the layers that are being computed have unpacked arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_vlm.models.cache import KVCache

from vlm_server.cache.kv_storage import KVStorage
from vlm_server.runner.kv.quantization import packed, unpacked

Sides = tuple[mx.array, mx.array]
"""Keys and values."""


class Plain(NamedTuple):
    """The unpacked form of a layer's keys and values: their head sizes, and their type."""

    key_size: int
    value_size: int
    dtype: mx.Dtype

    def unpack(self, sides: Sides, storage: KVStorage) -> Sides:
        keys, values = sides
        return (
            unpacked(keys, self.key_size, self.dtype, storage),
            unpacked(values, self.value_size, self.dtype, storage),
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one head's key and value of one token."""
        return (self.key_size + self.value_size) * self.dtype.size


def packs(update: Callable[[Any, mx.array, mx.array], Sides]) -> Any:
    """`update_and_fetch` of a layer that holds keys and values as its `storage` says."""

    @wraps(update)
    def update_and_fetch(layer: Any, keys: mx.array, values: mx.array) -> Sides:
        if layer.storage.is_exact:
            return update(layer, keys, values)
        layer.plain = Plain(keys.shape[-1], values.shape[-1], keys.dtype)
        sides = update(layer, *packed(keys, values, layer.storage))
        return layer.plain.unpack(sides, layer.storage)  # type: ignore[no-any-return]

    return update_and_fetch


def unpacks(fetch: Callable[[Any], Sides]) -> Callable[[Any], Sides]:
    """What `update_and_fetch` of such a layer returned last, for layers that share it."""

    @wraps(fetch)
    def state(layer: Any) -> Sides:
        is_plain = layer.storage.is_exact or layer.keys is None
        return fetch(layer) if is_plain else layer.plain.unpack(fetch(layer), layer.storage)

    return state


def plain_of(layer: Any) -> Plain | None:
    """The unpacked form of a layer; None if it holds keys and values exactly, or none yet."""
    plain: Plain | None = getattr(layer, "plain", None)
    return plain


def columns_of(layer: Any, rows: slice, columns: slice) -> Sides:
    """Some rows and columns of a layer, unpacked: (rows, heads, columns, head size)."""
    sides = layer.keys[rows, :, columns], layer.values[rows, :, columns]
    plain = plain_of(layer)
    return sides if plain is None else plain.unpack(sides, layer.storage)


class PackedKVCache(KVCache):  # type: ignore[misc]  # mlx-vlm is not typed
    """One sequence's layer that only appends; keys, values: (1, heads, capacity, bytes)."""

    plain: Plain

    def __init__(self, storage: KVStorage) -> None:
        super().__init__()
        self.storage = storage

    update_and_fetch = packs(KVCache.update_and_fetch)
    state = property(unpacks(KVCache.state.fget))
