"""MLX's device memory: reads, bounds and clears it. Knows the allocator; decides nothing."""

from __future__ import annotations

import os

import mlx.core as mx

from vlm_server.ports import MemoryReading
from vlm_server.runner.rope import is_cpu
from vlm_server.settings import Memory

NO_MEMORY = "the device ran out of memory; please ask again"
_ALLOCATIONS = ("malloc]", "out of memory", "unable to allocate", "cudamalloc")


def is_out_of_memory(error: Exception) -> bool:
    """Whether MLX says that an allocation failed; its errors have no types of their own."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(words in text for words in _ALLOCATIONS)


class MlxMemory:
    """The `DeviceMemory` of MLX's default device. The only one that sets limits or clears.

    MLX allocates beyond its limit if it must; below it, it keeps what is freed for reuse.
    """

    def __init__(self, settings: Memory) -> None:
        self._limit_bytes = settings.limit_bytes or suitable_limit_bytes()
        self._pool_limit_bytes = settings.pool_limit_bytes or _suitable_pool_bytes(
            self._limit_bytes
        )
        mx.set_memory_limit(self._limit_bytes)
        mx.set_cache_limit(self._pool_limit_bytes)

    @property
    def pool_limit_bytes(self) -> int:
        return self._pool_limit_bytes

    @property
    def trims_own_pool(self) -> bool:
        """MLX's allocators for GPUs do, buffer by buffer; the one for CPUs does not."""
        return not is_cpu()

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

    def device_used_bytes(self) -> int:
        """Of a CUDA device. A CPU's and Metal's memory is the machine's: see `ProcessMemory`."""
        info = {} if is_cpu() else mx.device_info(mx.default_device())
        return int(info["total_memory"]) - int(info["free_memory"]) if "free_memory" in info else 0


def suitable_limit_bytes() -> int:
    """What the default device can hold without harm to the rest of the machine."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    device = mx.default_device()
    if device.type == mx.DeviceType.cpu:
        return total // 2
    info = mx.device_info(device)
    recommended = int(info.get("max_recommended_working_set_size", 0))  # Metal
    return recommended or 9 * int(info.get("total_memory", total)) // 10


def _suitable_pool_bytes(limit_bytes: int) -> int:
    """A CPU's memory is everybody's, and the system hands it out fast; a GPU's is MLX's own."""
    return 256 << 20 if is_cpu() else limit_bytes // 8


def device_name() -> str:
    """What MLX runs on, for people: `cpu`, or the GPU's name."""
    device = mx.default_device()
    if device.type == mx.DeviceType.cpu:
        return "cpu"
    return str(mx.device_info(device).get("device_name", "gpu"))
