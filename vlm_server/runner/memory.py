"""Reads MLX's device memory and bounds its pool. Knows the allocator; decides nothing."""

from __future__ import annotations

import logging
import os
from typing import Any

import mlx.core as mx

from vlm_server.ports import Caches, MemoryReading
from vlm_server.runner.kv import can_keep, needs_snapshots
from vlm_server.settings import Cache

logger = logging.getLogger(__name__)

_MAX_LAYOUT_BYTES = 16 << 20


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


def make_caches(settings: Cache, language_model: Any) -> Caches:
    """The caches of a model whose weights are loaded, as large as `settings` or memory say."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = max(0, mx.get_memory_limit() - mx.get_active_memory())
    prefix_bytes = _size(settings.prefix_bytes, free // 4)
    if prefix_bytes and not can_keep(language_model):
        logger.warning("this model keeps its state in ways that prefixes can't be kept of")
        prefix_bytes = 0
    pixel_bytes = _size(settings.pixel_bytes, total // 32)
    return Caches.of(
        layout_bytes=min(_MAX_LAYOUT_BYTES, pixel_bytes),
        pixel_bytes=pixel_bytes,
        encoder_bytes=_size(settings.encoder_bytes, free // 16),
        prefix_bytes=prefix_bytes,
        needs_snapshots=needs_snapshots(language_model),
    )


def _size(wanted: int, suitable: int) -> int:
    return suitable if wanted < 0 else wanted


def device_name() -> str:
    """What MLX runs on, for people: `cpu`, or the GPU's name."""
    device = mx.default_device()
    if device.type == mx.DeviceType.cpu:
        return "cpu"
    return str(mx.device_info(device).get("device_name", "gpu"))
