"""Reads, limits and clears MLX's device memory; the governor decides when."""

from __future__ import annotations

import logging

import mlx.core as mx

from vlm_server.interfaces import MemoryReading
from vlm_server.runner.backends import backend_of
from vlm_server.runner.device.device import Device
from vlm_server.settings import MemorySettings
from vlm_server.sizes import memory_size

logger = logging.getLogger(__name__)


def limit_bytes(settings: MemorySettings, device: Device) -> int:
    """`memory.max_bytes`, or the suitable part of the device's memory; at most all of that."""
    wanted_bytes = settings.limit_on(device.memory_bytes) or device.suitable_bytes
    if wanted_bytes > device.memory_bytes:
        text = "memory.max_bytes is %s; the limit is all that the device has, %s"
        logger.warning(text, memory_size(wanted_bytes), memory_size(device.memory_bytes))
    return min(wanted_bytes, device.memory_bytes)


class MlxMemory:
    """The `DeviceMemory` of `device`; nothing else sets limits or clears.

    MLX allocates beyond its limit if it must; below it, freed memory stays in MLX's pool.
    """

    def __init__(self, settings: MemorySettings, device: Device) -> None:
        self._device = device
        self._backend = backend_of(device)
        self._wanted_pool_bytes = settings.max_pool_bytes
        MlxMemory.set_limit(self, limit_bytes(settings, device))  # ranks set their first one alike

    def set_limit(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._pool_limit_bytes = self._wanted_pool_bytes or self._backend.pool_bytes(limit_bytes)
        mx.set_memory_limit(self._limit_bytes)
        mx.set_cache_limit(self._pool_limit_bytes)

    @property
    def limit_bytes(self) -> int:
        """The limit that was set last."""
        return self._limit_bytes

    @property
    def pool_limit_bytes(self) -> int:
        return self._pool_limit_bytes

    @property
    def is_shared(self) -> bool:
        return self._backend.shares_memory

    @property
    def trims_own_pool(self) -> bool:
        return self._backend.trims_own_pool

    def read(self) -> MemoryReading:
        return MemoryReading(mx.get_active_memory(), mx.get_cache_memory(), self._limit_bytes)

    def read_peak(self) -> int:
        peak = mx.get_peak_memory()
        mx.reset_peak_memory()
        return max(peak, mx.get_active_memory())

    def synchronize(self) -> None:
        """Waits for this thread's stream."""
        mx.synchronize()

    def clear(self) -> None:
        """Waits for this thread's stream; an encode on another thread keeps its memory."""
        self.synchronize()
        mx.clear_cache()

    def is_short(self) -> bool:
        return self._backend.is_short_of_memory(self._device.memory_bytes)

    def device_used_bytes(self) -> int:
        return self._backend.used_bytes()
