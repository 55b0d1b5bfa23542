"""All caches of an engine: those in memory, and the tier on disk beneath them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vlm_server.cache.disk.tier import DiskRead, DiskReadResult, DiskTier, EncodedImage
from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.cache.lru import InspectableCache, Lease, LruCache
from vlm_server.cache.prefix import PrefixCache, PrefixMatch, Source
from vlm_server.cache.prompt_key import PromptKey
from vlm_server.errors import OutOfMemory
from vlm_server.protocol import CacheStats

logger = logging.getLogger(__name__)

__all__ = ["Caches", "EncodedImage", "Prefix"]

Prefix = PrefixMatch[Any, Any]
"""The cached KV of a prompt's beginning, which only `runner` can read."""


class DeviceSizes(NamedTuple):
    """Sizes of the caches on the device, in bytes."""

    encoder_bytes: int
    tile_bytes: int
    prefix_bytes: int
    min_prefix_bytes: int = 0
    """Prefixes of this size are evicted only after tiles and features."""


class Caches:
    """The caches that engine, preparers and runner share. Thread-safe.

    The tier on disk holds features and KV, from `begin_serving` on.
    """

    def __init__(
        self,
        *,
        token_layout_bytes: int = 0,
        pixel_bytes: int = 0,
        encoder_bytes: int = 0,
        tile_bytes: int = 0,
        prefix_bytes: int = 0,
        vector_bytes: int = 0,
        needs_snapshots: bool = False,
        kv_storage: KVStorage = EXACT,
        open_disk: Callable[[], DiskTier] = DiskTier,
        sizes: Callable[[int], DeviceSizes] | None = None,
    ) -> None:
        """Sizes are in bytes; a cache of 0 bytes stores nothing.

        sizes: of the device memory that the weights leave; without it, `resize` has no effect.
        """
        self.token_layouts = LruCache[Any]("token_layout", token_layout_bytes)
        """Tokens of images and videos, and their positions, so that they need no decoding."""
        self.pixels = LruCache[Any]("pixel", pixel_bytes)
        """Output of the processor."""
        self.features = LruCache[EncodedImage]("encoder", encoder_bytes)
        """Output of the encoder."""
        self.tiles = LruCache[Any]("tile", tile_bytes)
        """Output of the encoder for single tiles, for families that cut images into tiles."""
        self.prefixes = PrefixCache[Any, Any](
            "prefix", prefix_bytes, needs_snapshots=needs_snapshots
        )
        """KV."""
        self.kv_storage = kv_storage
        """How KV is stored, in memory and on disk."""
        self.vectors = LruCache[NDArray[np.float32]]("vector", vector_bytes)
        """Vectors of whole inputs, of a model that embeds."""
        self._open_disk = open_disk
        self._sizes = sizes
        self._min_prefix_bytes = 0
        self._opened_disk = DiskTier()
        """The tier on disk, for its statistics and `close`."""
        self._disk = DiskTier()
        """The same while it is in use; one that holds nothing before and afterwards."""

    # ---- all of them -----------------------------------------------------------------

    def begin_serving(self) -> None:
        """Drop the warm-up's entries, reset the counters, and open the disk."""
        self.clear()
        self._disk = self._opened_disk = self._open_disk()

    def stats(self) -> tuple[CacheStats, ...]:
        return tuple(cache.stats() for cache in self._all)

    def clear(self) -> None:
        """Drop entries in memory that are not pinned, and reset the counters."""
        for cache in self._memory:
            cache.clear()

    @property
    def num_references(self) -> int:
        """Number of unreleased leases and matches."""
        return sum(cache.num_references for cache in self._memory)

    def close(self, seconds: float) -> None:
        """Stop using the disk; write its queue for at most `seconds`."""
        self._disk = DiskTier()
        self._opened_disk.close(seconds)

    @property
    def _memory(self) -> tuple[LruCache[Any] | PrefixCache[Any, Any], ...]:
        on_device = (self.features, self.tiles, self.prefixes)
        return (self.token_layouts, self.pixels, *on_device, self.vectors)

    @property
    def _all(self) -> tuple[InspectableCache, ...]:
        return (*self._memory, *self._opened_disk.caches)

    # ---- device memory ---------------------------------------------------------------

    @property
    def evictable_bytes(self) -> int:
        """Device memory of entries that are not pinned."""
        on_device = (self.features, self.tiles, self.prefixes)
        return sum(cache.evictable_bytes for cache in on_device)

    def evict(self, num_bytes: int) -> int:
        """Free up to `num_bytes` of device memory. Returns the number of bytes.

        First prefixes beyond `DeviceSizes.min_prefix_bytes`, then tiles, features and all prefixes.
        """
        surplus_bytes = self.prefixes.stats().size_bytes - self._min_prefix_bytes
        freed = self.prefixes.evict(min(num_bytes, surplus_bytes))
        for cache in (self.tiles, self.features, self.prefixes):
            freed += cache.evict(num_bytes - freed)
        return freed

    def resize(self, free_bytes: int) -> None:
        """Fit the caches on the device to `free_bytes`, the memory that the weights leave."""
        if self._sizes is None:
            return
        sizes = self._sizes(free_bytes)
        self.features.resize(sizes.encoder_bytes)
        self.tiles.resize(sizes.tile_bytes)
        self.prefixes.resize(sizes.prefix_bytes)
        self._min_prefix_bytes = sizes.min_prefix_bytes

    def drop(self) -> None:
        """Evict all entries in memory that are not pinned."""
        for cache in self._memory:
            cache.evict(cache.evictable_bytes)

    # ---- features --------------------------------------------------------------------

    def store_features(self, key: str, features: EncodedImage) -> Lease[EncodedImage]:
        """Store features, unless `key` has some by now; returns a lease on the stored ones."""
        self._disk.store_features(key, features)
        return self.features.put(key, features, features.size_bytes)

    # ---- vectors ---------------------------------------------------------------------

    def store_vectors(self, key: str, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Store vectors, unless `key` has some by now; returns the stored ones."""
        lease = self.vectors.put(key, vectors, vectors.nbytes)
        lease.release()
        return lease.value

    # ---- prefixes --------------------------------------------------------------------

    @property
    def stores_prefixes(self) -> bool:
        return bool(self.prefixes.limit_bytes)

    def store_prefix(self, prompt: PromptKey, source: Source[Any, Any], salt: str) -> None:
        """Store the KV of `prompt` that was just computed."""
        if self.prefixes.limit_bytes:
            self.prefixes.insert(prompt, source, salt, merges_parts=True)
            self._disk.store_prefix(prompt, source, salt)

    # ---- the disk --------------------------------------------------------------------

    @property
    def disk(self) -> DiskTier:
        """The tier on disk, for `find_*`; only `read_disk` reads from it."""
        return self._disk

    def read_disk(self, disk_read: DiskRead, is_cancelled: Callable[[], bool]) -> DiskReadResult:
        """Read `disk_read` into memory, as far as possible; may take long."""
        result = DiskReadResult()
        try:
            self._read_prefix(disk_read, result, is_cancelled)
            self._read_features(disk_read, result, is_cancelled)
        except (OutOfMemory, MemoryError):
            logger.warning("not enough memory to read the cached part of a prompt from disk")
            result.is_out_of_memory = True
        except Exception:
            logger.exception("the cached part of a prompt can't be read from disk")
        return result

    def _read_prefix(
        self, disk_read: DiskRead, result: DiskReadResult, is_cancelled: Callable[[], bool]
    ) -> None:
        """Read the prefix part by part; the match pins each part while the next one is read."""
        key, limit, salt = disk_read.key, disk_read.limit, disk_read.salt
        if not disk_read.prefix_tokens or is_cancelled():
            return
        match = self.prefixes.rematch(self.prefixes.empty_match(), key, limit, salt)
        result.prefix = match
        for source in self._disk.read_prefix(key, match.length, disk_read.prefix_tokens, salt):
            self.prefixes.insert(key.part(0, source.length), source, salt)
            match = result.prefix = self.prefixes.rematch(match, key, limit, salt)
            if match.length < source.length or is_cancelled():
                return

    def _read_features(
        self, disk_read: DiskRead, result: DiskReadResult, is_cancelled: Callable[[], bool]
    ) -> None:
        for index, key in disk_read.features.items():
            if is_cancelled():
                return
            lease = self.features.lease(key) if key in self.features else None
            if lease is None and (features := self._disk.read_features(key)) is not None:
                lease = self.features.put(key, features, features.size_bytes)
            if lease is not None:
                result.features[index] = lease
