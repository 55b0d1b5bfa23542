"""All caches of an engine as one: those in memory, and the tier on disk beneath them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vlm_server.cache.cache import Cache, EncodedImage
from vlm_server.cache.disk.load import DiskLoad, Loaded
from vlm_server.cache.disk.tier import DiskTier, NoDisk
from vlm_server.cache.lru import Lease, LruCache
from vlm_server.cache.prefix import PrefixCache, PrefixMatch, Source
from vlm_server.cache.prompt_key import PromptKey
from vlm_server.errors import OutOfMemory
from vlm_server.protocol import CacheStats

logger = logging.getLogger(__name__)

__all__ = ["Caches", "EncodedImage", "Prefix"]

Prefix = PrefixMatch[Any, Any]
"""A prompt's beginning, as KV that only `runner` can read."""


DeviceSizes = Callable[[int], tuple[int, int, int]]
"""Device memory that the weights leave, to the sizes of encoder, tile and prefix cache; bytes."""


class Caches:
    """What engine, preparers and runner share; sizes are in `settings.Cache`. Thread-safe.

    token_layouts: how many tokens images and videos have, and where; saves decoding them.
    pixels: what the processor made of them. features: what the encoder did; tiles: parts of that,
    of families that cut pictures into tiles. prefixes: KV.
    The tier on disk holds features and KV. It is opened by `begin_serving`.
    """

    def __init__(
        self,
        *,
        token_layouts: LruCache[Any],
        pixels: LruCache[Any],
        features: LruCache[EncodedImage],
        tiles: LruCache[Any],
        prefixes: PrefixCache[Any, Any],
        open_disk: Callable[[], DiskTier],
        sizes: DeviceSizes | None,
    ) -> None:
        self.token_layouts = token_layouts
        self.pixels = pixels
        self.features = features
        self.tiles = tiles
        self.prefixes = prefixes
        self._open_disk = open_disk
        self._sizes = sizes
        self._opened_disk: DiskTier = NoDisk()
        self._disk: DiskTier = NoDisk()

    @classmethod
    def of(
        cls,
        *,
        token_layout_bytes: int = 0,
        pixel_bytes: int = 0,
        encoder_bytes: int = 0,
        tile_bytes: int = 0,
        prefix_bytes: int = 0,
        needs_snapshots: bool = False,
        open_disk: Callable[[], DiskTier] = NoDisk,
        sizes: DeviceSizes | None = None,
    ) -> Caches:
        """Caches of these sizes; one of 0 bytes stores nothing.

        Without `sizes` those on the device stay as they are, whatever memory there is.
        """
        return cls(
            token_layouts=LruCache("token_layout", token_layout_bytes),
            pixels=LruCache("pixel", pixel_bytes),
            features=LruCache("encoder", encoder_bytes),
            tiles=LruCache("tile", tile_bytes),
            prefixes=PrefixCache("prefix", prefix_bytes, needs_snapshots=needs_snapshots),
            open_disk=open_disk,
            sizes=sizes,
        )

    # ---- all of them -----------------------------------------------------------------

    def begin_serving(self) -> None:
        """Drop what the warm-up left, count from zero, and open the disk."""
        self.clear()
        self._disk = self._opened_disk = self._open_disk()

    def read(self) -> tuple[CacheStats, ...]:
        return tuple(cache.read() for cache in self._all)

    def clear(self) -> None:
        """Drop what is in memory and not held, and count from zero there."""
        for cache in self._memory:
            cache.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError, see `Cache.check_integrity`."""
        for cache in self._all:
            cache.check_integrity()

    @property
    def num_holds(self) -> int:
        """Leases and matches that were given out and not released."""
        return sum(cache.num_holds for cache in self._memory)

    def close(self, seconds: float) -> None:
        """Write to disk what waits to be, for `seconds` at most; the disk is not used any more."""
        self._disk = NoDisk()
        self._opened_disk.close(seconds)

    @property
    def _memory(self) -> tuple[LruCache[Any] | PrefixCache[Any, Any], ...]:
        return self.token_layouts, self.pixels, self.features, self.tiles, self.prefixes

    @property
    def _all(self) -> tuple[Cache, ...]:
        return (*self._memory, *self._opened_disk.caches)

    # ---- device memory ---------------------------------------------------------------

    @property
    def evictable_bytes(self) -> int:
        """Device memory of entries that no request holds."""
        on_device = (self.features, self.tiles, self.prefixes)
        return sum(cache.evictable_bytes for cache in on_device)

    def evict(self, num_bytes: int) -> int:
        """Free up to `num_bytes` of device memory, prefixes first. Returns the bytes."""
        freed = self.prefixes.evict(num_bytes)
        freed += self.tiles.evict(num_bytes - freed)
        return freed + self.features.evict(num_bytes - freed)

    def resize(self, free_bytes: int) -> None:
        """Fit the caches on the device to `free_bytes`, the memory that the weights leave."""
        if self._sizes is None:
            return
        encoder_bytes, tile_bytes, prefix_bytes = self._sizes(free_bytes)
        self.features.resize(encoder_bytes)
        self.tiles.resize(tile_bytes)
        self.prefixes.resize(prefix_bytes)

    def drop(self) -> None:
        """Evict from memory whatever is not held."""
        for cache in self._memory:
            cache.evict(cache.evictable_bytes)

    # ---- features --------------------------------------------------------------------

    def store_features(self, key: str, features: EncodedImage) -> Lease[EncodedImage]:
        """What was just encoded, or what was stored as `key` meanwhile."""
        self._disk.store_features(key, features)
        return self.features.put(key, features, features.size_bytes)

    # ---- prefixes --------------------------------------------------------------------

    @property
    def stores_prefixes(self) -> bool:
        return bool(self.prefixes.limit_bytes)

    def store_prefix(self, prompt: PromptKey, source: Source[Any, Any], salt: str) -> None:
        """What was just computed of `prompt`."""
        if self.prefixes.limit_bytes:
            self.prefixes.insert(prompt, source, salt, joins=True)
            self._disk.store_prefix(prompt, source, salt)

    # ---- the disk --------------------------------------------------------------------

    @property
    def disk(self) -> DiskTier:
        """To be asked what it has; only `load` reads that."""
        return self._disk

    def load(self, wanted: DiskLoad, is_cancelled: Callable[[], bool]) -> Loaded:
        """Read what is wanted into memory, as far as that can be done; may take long."""
        loaded = Loaded()
        try:
            self._load_prefix(wanted, loaded, is_cancelled)
            self._load_features(wanted, loaded, is_cancelled)
        except (OutOfMemory, MemoryError):
            logger.warning("there is not enough memory to read what the disk has of a prompt")
            loaded.is_out_of_memory = True
        except Exception:
            logger.exception("what the disk has of a prompt can't be copied to memory")
        return loaded

    def _load_prefix(
        self, wanted: DiskLoad, loaded: Loaded, is_cancelled: Callable[[], bool]
    ) -> None:
        """What is stored stays pinned by the match, or it could be evicted before the next part."""
        key, limit, salt = wanted.key, wanted.limit, wanted.salt
        if not wanted.prefix_tokens or is_cancelled():
            return
        match = self.prefixes.improve(self.prefixes.match_nothing(), key, limit, salt)
        loaded.prefix = match
        for source in self._disk.load_prefix(key, match.length, wanted.prefix_tokens, salt):
            self.prefixes.insert(key.part(0, source.length), source, salt)
            match = loaded.prefix = self.prefixes.improve(match, key, limit, salt)
            if match.length < source.length or is_cancelled():
                return

    def _load_features(
        self, wanted: DiskLoad, loaded: Loaded, is_cancelled: Callable[[], bool]
    ) -> None:
        for index, key in wanted.features.items():
            if is_cancelled():
                return
            lease = self.features.lease(key) if key in self.features else None
            if lease is None and (features := self._disk.load_features(key)) is not None:
                lease = self.features.put(key, features, features.size_bytes)
            if lease is not None:
                loaded.features[index] = lease
