"""Builds all caches of a loaded model, in memory and on disk, as settings and memory say."""

from __future__ import annotations

import logging

from vlm_server import machine
from vlm_server.cache.caches import Caches
from vlm_server.ports import MemoryReading
from vlm_server.runner.kv.disk_cache import open_disk_cache
from vlm_server.runner.kv.segments import can_store, needs_snapshots
from vlm_server.runner.model.load import LoadedModel
from vlm_server.settings import Cache

logger = logging.getLogger(__name__)


def build_caches(settings: Cache, memory: MemoryReading, loaded: LoadedModel) -> Caches:
    """The caches of a model whose weights are in `memory`.

    The disk is opened by `Caches.begin_serving`.
    """
    free = max(0, memory.limit_bytes - memory.active_bytes)
    with_snapshots = needs_snapshots(loaded.language_model)
    prefix_bytes = _size(settings.prefix_bytes, free // 4)
    if prefix_bytes and not can_store(loaded.language_model):
        logger.warning("this model's state is of a kind that the prefix cache can't store")
        prefix_bytes = 0
    pixel_bytes = _size(settings.pixel_bytes, machine.memory_bytes() // 32)
    return Caches.of(
        token_layout_bytes=min(settings.token_layout_bytes, pixel_bytes),
        pixel_bytes=pixel_bytes,
        encoder_bytes=_size(settings.encoder_bytes, free // 16),
        prefix_bytes=prefix_bytes,
        needs_snapshots=with_snapshots,
        open_disk=lambda: open_disk_cache(
            settings,
            loaded.host.fingerprint,
            loaded.device.name,
            prefix_bytes,
            needs_snapshots=with_snapshots,
        ),
    )


def _size(wanted: int, suitable: int) -> int:
    return suitable if wanted < 0 else wanted
