"""The empty caches of a language model's layers, and what is known of them before any token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_vlm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache

from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.runner.kv.packed_cache import PackedKVCache
from vlm_server.runner.kv.window_cache import WindowKVCache

_STORABLE = (KVCache, PackedKVCache, WindowKVCache, ArraysCache)


def new_layers(language_model: Any, storage: KVStorage = EXACT) -> list[Any]:
    """An empty cache for each layer of one sequence that has one."""
    return [_as_ours(layer, storage) for layer in make_prompt_cache(language_model)]


def _as_ours(layer: Any, storage: KVStorage) -> Any:
    if type(layer) is KVCache:
        return empty_layer(None, storage)
    if type(layer) is RotatingKVCache and not layer.keep:
        return empty_layer(layer.max_size, storage)
    return layer


def empty_layer(max_size: int | None, storage: KVStorage) -> KVCache | WindowKVCache:
    """An empty cache of a layer that appends, with a window of `max_size` tokens if it has one."""
    if max_size is not None:
        return WindowKVCache(max_size, storage)
    return KVCache() if storage.is_exact else PackedKVCache(storage)


def storage_of(layer: Any) -> KVStorage:
    """How a layer holds its keys and values."""
    storage: KVStorage = getattr(layer, "storage", EXACT)
    return storage


def buffers_of(layers: Sequence[Any]) -> list[Any]:
    """The arrays that the layers hold, to be evaluated: `state` would unpack them."""
    return [
        layer.state if storage_of(layer).is_exact else (layer.keys, layer.values)
        for layer in layers
    ]


def only_append(layers: Sequence[Any]) -> bool:
    """Whether all layers are plain ones, which can be cut after any token."""
    return all(type(layer) is KVCache for layer in layers)


def can_batch(layers: Sequence[Any]) -> bool:
    """Whether sequences with such layers can decode as rows of a batch."""
    return all(
        type(layer) in _STORABLE
        or (
            not isinstance(layer, KVCache) and hasattr(layer, "merge") and hasattr(layer, "extract")
        )
        for layer in layers
    )


def has_states(layers: Sequence[Any]) -> bool:
    """Whether some layer has only its newest state, so that a snapshot must be taken at once."""
    return not all(isinstance(layer, KVCache | WindowKVCache) for layer in layers)


def can_store(language_model: Any) -> bool:
    """Whether all layers of this model are of types that can be stored."""
    return all(type(layer) in _STORABLE for layer in new_layers(language_model))


def needs_snapshots(language_model: Any) -> bool:
    """Whether some layer can't be cut after any token."""
    return not all(isinstance(layer, KVCache) for layer in new_layers(language_model))
