"""Builds all caches of a loaded model, in memory and on disk, as settings and memory say."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from vlm_server.cache.caches import Caches, DeviceSizes
from vlm_server.cache.disk.files import default_folder
from vlm_server.cache.disk.store import DiskStore
from vlm_server.cache.disk.tier import DiskTier
from vlm_server.cache.kv_storage import EXACT, EXACT_BITS, KVStorage
from vlm_server.interfaces import MemoryReading
from vlm_server.platform import machine
from vlm_server.runner.disk.disk_cache import DiskCache
from vlm_server.runner.fingerprint import KeptHashes, state_fingerprint
from vlm_server.runner.kv.layers import can_store, needs_snapshots
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.loading.probe import planned_state_size
from vlm_server.settings import CacheSettings
from vlm_server.settings.paths import expand_home

logger = logging.getLogger(__name__)

_TILES_PART = 4
"""Tiles get 1/4 of `encoder_bytes`: those of the latest screenshot are enough."""
_CONVERSATION_TOKENS = 32 << 10
"""The length of an agent's conversation, for which the prefix cache should have room."""


def build_caches(settings: CacheSettings, memory: MemoryReading, loaded: LoadedModel) -> Caches:
    """The caches of a model whose weights are in `memory`.

    The disk is opened by `Caches.begin_serving`; until then the weights are hashed for it.
    """
    embeds = loaded.family.embeds is not None
    with_snapshots = not embeds and needs_snapshots(loaded.language_model)
    stores_prefixes = not embeds and _stores_prefixes(loaded, with_snapshots=with_snapshots)
    if settings.max_prefix_bytes and not (stores_prefixes or embeds):
        logger.warning("this model's state is of a kind that the prefix cache can't store")
    with_snapshots = with_snapshots and stores_prefixes
    free_bytes = max(0, memory.limit_bytes - memory.active_bytes)
    prefix_sizes = PrefixSizes.of(settings, loaded, free_bytes) if stores_prefixes else None

    def sizes(free_bytes: int) -> DeviceSizes:
        encoder_bytes = _size(settings.max_encoder_bytes, free_bytes // 16)
        tile_bytes = 0 if loaded.tiling is None else encoder_bytes // _TILES_PART
        prefix_bytes = min_prefix_bytes = 0
        if prefix_sizes is not None:
            prefix_bytes = _size(settings.max_prefix_bytes, prefix_sizes.suitable_bytes(free_bytes))
            min_prefix_bytes = prefix_sizes.min_bytes(free_bytes)
        return DeviceSizes(encoder_bytes - tile_bytes, tile_bytes, prefix_bytes, min_prefix_bytes)

    storage = EXACT if prefix_sizes is None else prefix_sizes.storage
    if not storage.is_exact:
        whose = "all" if storage.of_running else "cached"
        logger.info("%s KV is stored with %d bits (cache.kv_bits)", whose, storage.bits)
    pixel_bytes = _size(settings.max_pixel_bytes, machine.memory_bytes() // 32)
    vector_bytes = _size(settings.max_vector_bytes, machine.memory_bytes() // 64)
    folder, fingerprint = disk_folder(settings), Future[str]()
    if settings.max_disk_bytes:
        hashes = KeptHashes(folder / "hashes.json")
        fingerprint = _in_background(lambda: loaded.checkpoint.fingerprint(hashes))

    def open_disk() -> DiskTier:
        """The tier in the folder; an empty one, with a warning, if the folder can't be used."""
        if not settings.max_disk_bytes:
            return DiskTier()
        try:
            owner = state_fingerprint(fingerprint.result(), loaded.device.name)
            store = DiskStore("disk", folder, owner, settings.max_disk_bytes)
        except OSError as error:
            logger.warning("nothing is stored on disk in %s: %s", folder, error.strerror)
            return DiskTier()
        return DiskCache(
            store,
            owner,
            lambda: caches.prefixes.limit_bytes,
            needs_snapshots=with_snapshots,
            kv_storage=storage,
        )

    caches = Caches(
        token_layout_bytes=min(settings.max_token_layout_bytes, pixel_bytes),
        pixel_bytes=pixel_bytes,
        vector_bytes=vector_bytes,
        needs_snapshots=with_snapshots,
        kv_storage=storage,
        open_disk=open_disk,
        sizes=sizes,
    )
    caches.resize(free_bytes)
    return caches


@dataclass(frozen=True, slots=True)
class PrefixSizes:
    """Suitable sizes of the prefix cache of one model, in bytes."""

    conversation_bytes: int
    """The size of a stored conversation of `_CONVERSATION_TOKENS`, or of the model's context."""
    storage: KVStorage

    @classmethod
    def of(cls, settings: CacheSettings, loaded: LoadedModel, free_bytes: int) -> PrefixSizes:
        """Those of a model that leaves `free_bytes`, which decide what `kv_bits = auto` means."""
        state_size = planned_state_size(loaded.language_model, loaded.drafter)
        num_tokens = min(_CONVERSATION_TOKENS, loaded.spec.context_tokens)

        def sizes(bits: int) -> PrefixSizes:
            storage = KVStorage(bits, settings.kv_group_size, settings.quantize_running)
            return cls(state_size.stored_bytes_for(num_tokens, storage), storage)

        if settings.kv_bits != "auto":
            return sizes(settings.kv_bits)
        exact = sizes(EXACT_BITS)
        prefix_bytes = _size(settings.max_prefix_bytes, exact.suitable_bytes(free_bytes))
        return exact if prefix_bytes >= 2 * exact.conversation_bytes else sizes(8)

    def suitable_bytes(self, free_bytes: int) -> int:
        """1/4 of the free memory; up to 1/2 where that holds no two conversations."""
        return max(free_bytes // 4, min(free_bytes // 2, 2 * self.conversation_bytes))

    def min_bytes(self, free_bytes: int) -> int:
        """Prefixes of this size, one conversation's as far as it fits, are evicted last."""
        return min(free_bytes // 2, self.conversation_bytes)


def _stores_prefixes(loaded: LoadedModel, *, with_snapshots: bool) -> bool:
    """Whether KV of this model can be stored; other ranks mirror segments only."""
    alone = loaded.ranks is None
    return can_store(loaded.language_model) and (alone or not with_snapshots)


def disk_folder(settings: CacheSettings) -> Path:
    """The folder of the disk cache; a relative path is one in the system's folder for caches."""
    return default_folder() / expand_home(settings.disk_folder)


def _in_background(work: Callable[[], str]) -> Future[str]:
    """The result or error of `work`, from a daemon thread."""
    digest = Future[str]()

    def run() -> None:
        try:
            digest.set_result(work())
        except BaseException as error:  # noqa: BLE001 - `Future.result` raises it
            digest.set_exception(error)

    threading.Thread(target=run, name="fingerprint", daemon=True).start()
    return digest


def _size(configured: int | None, suitable: int) -> int:
    return suitable if configured is None else configured
