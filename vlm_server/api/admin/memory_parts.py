"""What an engine's device memory is used for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vlm_server.protocol import CacheStats, Stats

_ON_DEVICE = ("encoder", "tile", "prefix")


class MemoryParts(msgspec.Struct, frozen=True):
    """Device memory of one engine, in bytes; the parts add up to what it holds."""

    weights_bytes: int
    kv_bytes: int
    """KV, states and activations of requests in flight."""
    caches_bytes: int
    """Caches of prefixes and of encoded images."""
    pool_bytes: int
    """Freed, and kept for reuse."""
    limit_bytes: int


def memory_parts(stats: Stats) -> MemoryParts:
    """The parts, as far as the engine can tell them apart."""
    memory = stats.memory
    weights = min(memory.baseline_bytes, memory.active_bytes)
    used = memory.active_bytes - weights
    caches = min(used, sum(cache.size_bytes for cache in device_caches(stats)))
    return MemoryParts(weights, used - caches, caches, memory.pool_bytes, memory.limit_bytes)


def device_caches(stats: Stats) -> Sequence[CacheStats]:
    """The caches that hold device memory."""
    return [cache for cache in stats.caches if cache.name in _ON_DEVICE]
