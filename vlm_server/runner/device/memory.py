"""MLX's device memory: reads, bounds and clears it. Knows the allocator; decides nothing."""

from __future__ import annotations

import logging
import os
from typing import Any

import mlx.core as mx

from vlm_server import heap
from vlm_server.cache.caches import Caches
from vlm_server.ports import MemoryReading
from vlm_server.runner.device.device import Device
from vlm_server.runner.device.footprint import footprint_bytes
from vlm_server.runner.kv.segments import can_keep, needs_snapshots
from vlm_server.settings import Cache, Memory

logger = logging.getLogger(__name__)

NO_MEMORY = "the device ran out of memory; please ask again"
_ALLOCATIONS = ("malloc]", "out of memory", "unable to allocate", "cudamalloc")


def is_out_of_memory(error: Exception) -> bool:
    """Whether MLX says that an allocation failed; its errors have no types of their own."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _ALLOCATIONS)


class MlxMemory:
    """The `DeviceMemory` of `device`. The only one that sets limits or clears.

    MLX allocates beyond its limit if it must; below it, it keeps what is freed for reuse.
    """

    def __init__(self, settings: Memory, device: Device) -> None:
        self._device = device
        self._limit_bytes = settings.limit_bytes or device.suitable_bytes
        self._pool_limit_bytes = settings.pool_limit_bytes or _suitable_pool_bytes(
            self._limit_bytes, device
        )
        mx.set_memory_limit(self._limit_bytes)
        mx.set_cache_limit(self._pool_limit_bytes)

    @property
    def pool_limit_bytes(self) -> int:
        return self._pool_limit_bytes

    @property
    def trims_own_pool(self) -> bool:
        return self._device.trims_own_pool

    def read(self) -> MemoryReading:
        return MemoryReading(mx.get_active_memory(), mx.get_cache_memory(), self._limit_bytes)

    def take_peak(self) -> int:
        peak = mx.get_peak_memory()
        mx.reset_peak_memory()
        return max(peak, mx.get_active_memory())

    def settle(self) -> None:
        """Waits for this thread's stream."""
        mx.synchronize()

    def clear(self) -> None:
        """Waits for this thread's stream. What an encode holds meanwhile is not in the pool."""
        self.settle()
        mx.clear_cache()

    def trim(self) -> None:
        heap.trim()

    def footprint_bytes(self) -> int:
        return footprint_bytes()

    def device_used_bytes(self) -> int:
        """Of a CUDA device. A CPU's and Metal's memory is the machine's: see `footprint_bytes`."""
        return self._device.used_bytes()


def _suitable_pool_bytes(limit_bytes: int, device: Device) -> int:
    """A CPU's memory is everybody's, and the system hands it out fast; a GPU's is MLX's own."""
    return 256 << 20 if device.is_cpu else limit_bytes // 8


def make_caches(settings: Cache, memory: MlxMemory, language_model: Any) -> Caches:
    """The caches of a model whose weights are loaded, as large as `settings` or memory say."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    reading = memory.read()
    free = max(0, reading.limit_bytes - reading.active_bytes)
    prefix_bytes = _size(settings.prefix_bytes, free // 4)
    if prefix_bytes and not can_keep(language_model):
        logger.warning("this model keeps its state in ways that prefixes can't be kept of")
        prefix_bytes = 0
    pixel_bytes = _size(settings.pixel_bytes, total // 32)
    return Caches.of(
        token_layout_bytes=min(settings.token_layout_bytes, pixel_bytes),
        pixel_bytes=pixel_bytes,
        encoder_bytes=_size(settings.encoder_bytes, free // 16),
        prefix_bytes=prefix_bytes,
        needs_snapshots=needs_snapshots(language_model),
    )


def _size(wanted: int, suitable: int) -> int:
    return suitable if wanted < 0 else wanted
