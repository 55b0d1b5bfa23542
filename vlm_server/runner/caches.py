"""Builds all caches of a loaded model, in memory and on disk, as settings and memory say."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from vlm_server.cache.caches import Caches
from vlm_server.interfaces import MemoryReading
from vlm_server.platform import machine
from vlm_server.runner.disk.disk_cache import disk_folder, open_disk_cache
from vlm_server.runner.fingerprint import KeptHashes
from vlm_server.runner.kv.segments import can_store, needs_snapshots
from vlm_server.runner.loaded import LoadedModel
from vlm_server.settings import CacheSettings

logger = logging.getLogger(__name__)

_TILES_PART = 4
"""The tiles' part of `encoder_bytes` is one of so many: a conversation needs those of its latest
screenshot alone."""


def build_caches(settings: CacheSettings, memory: MemoryReading, loaded: LoadedModel) -> Caches:
    """The caches of a model whose weights are in `memory`.

    The disk is opened by `Caches.begin_serving`; until then the weights are hashed for it.
    """
    free = max(0, memory.limit_bytes - memory.active_bytes)
    with_snapshots = needs_snapshots(loaded.language_model)
    alone = loaded.ranks is None  # other ranks can be told of segments only
    stores_prefixes = can_store(loaded.language_model) and (alone or not with_snapshots)
    if settings.prefix_bytes and not stores_prefixes:
        logger.warning("this model's state is of a kind that the prefix cache can't store")

    def sizes(free: int) -> tuple[int, int, int]:
        prefix_bytes = _size(settings.prefix_bytes, free // 4) if stores_prefixes else 0
        encoder_bytes = _size(settings.encoder_bytes, free // 16)
        tile_bytes = 0 if loaded.tiling is None else encoder_bytes // _TILES_PART
        return encoder_bytes - tile_bytes, tile_bytes, prefix_bytes

    encoder_bytes, tile_bytes, prefix_bytes = sizes(free)
    pixel_bytes = _size(settings.pixel_bytes, machine.memory_bytes() // 32)
    fingerprint = Future[str]()
    if settings.disk_bytes:
        hashes = KeptHashes(disk_folder(settings) / "hashes.json")
        fingerprint = _in_background(lambda: loaded.checkpoint.fingerprint(hashes))
    caches = Caches(
        token_layout_bytes=min(settings.token_layout_bytes, pixel_bytes),
        pixel_bytes=pixel_bytes,
        encoder_bytes=encoder_bytes,
        tile_bytes=tile_bytes,
        prefix_bytes=prefix_bytes,
        needs_snapshots=with_snapshots,
        open_disk=lambda: open_disk_cache(
            settings,
            fingerprint.result,
            loaded.device.name,
            lambda: caches.prefixes.limit_bytes,
            needs_snapshots=with_snapshots,
        ),
        sizes=sizes,
    )
    return caches


def _in_background(work: Callable[[], str]) -> Future[str]:
    """The result or error of `work`, from a daemon thread."""
    found = Future[str]()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result meets it
            found.set_exception(error)

    threading.Thread(target=run, name="fingerprint", daemon=True).start()
    return found


def _size(wanted: int, suitable: int) -> int:
    return suitable if wanted < 0 else wanted
