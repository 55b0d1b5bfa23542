"""Reads MLX's device memory and bounds its pool. Knows the allocator; decides nothing."""

from __future__ import annotations

import mlx.core as mx

from vlm_server.ports import MemoryReading


class DeviceMemory:
    """The `MemoryProbe` of the inference thread's device."""

    def __init__(self, pool_limit_bytes: int) -> None:
        """`pool_limit_bytes`: most freed memory to keep; 0 is what suits the device."""
        mx.set_cache_limit(pool_limit_bytes or _suitable_pool_bytes())

    def read(self) -> MemoryReading:
        return MemoryReading(
            active_bytes=mx.get_active_memory(),
            pool_bytes=mx.get_cache_memory(),
            peak_bytes=mx.get_peak_memory(),
        )


def _suitable_pool_bytes() -> int:
    """A CPU's memory is everybody's, and the system hands it out fast; a GPU's is MLX's own."""
    is_cpu = mx.default_device().type == mx.DeviceType.cpu
    return 256 << 20 if is_cpu else mx.get_memory_limit() // 8


def device_name() -> str:
    """What MLX runs on, for people: `cpu`, or the GPU's name."""
    device = mx.default_device()
    if device.type == mx.DeviceType.cpu:
        return "cpu"
    return str(mx.device_info(device).get("device_name", "gpu"))
