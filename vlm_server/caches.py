"""All that is kept of what was read, encoded and computed: what engine and runner share.

Knows which cache is for what, and the tier on disk beneath them; knows no tensor and no policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from vlm_server.cache.elements import Elements
from vlm_server.cache.ledger import Cache, Ledger
from vlm_server.cache.lru import Lease, LruCache
from vlm_server.cache.prefix import PrefixCache, Source
from vlm_server.ports import EncodedImage, Prefix


class DiskTier(Protocol):
    """Features and KV that outlive the process. What can't be kept or found is no error.

    What is kept is noted by the engine's thread and written later; what is found is read at
    once, by the thread that asks.
    """

    @property
    def caches(self) -> tuple[Cache, ...]:
        """For the ledger."""
        ...

    def keep_features(self, key: str, features: EncodedImage) -> None: ...

    def find_features(self, key: str) -> EncodedImage | None: ...

    def keep_prefix(self, elements: Elements, source: Source[Any, Any], salt: str) -> None: ...

    def find_prefix(
        self, elements: Elements, known: int, limit: int, salt: str, least: int
    ) -> FoundPrefix | None:
        """What reaches further than the first `known` elements, to `least` to `limit` of them."""
        ...

    def close(self, seconds: float) -> None:
        """Write what waits, for so long at most. Nothing can be kept or found any more."""
        ...


class FoundPrefix(Source[Any, Any], Protocol):
    """A prompt's first `length` elements, as far as they were asked for."""

    @property
    def length(self) -> int: ...


class NoDisk:
    """The `DiskTier` that has nothing."""

    caches = ()

    def keep_features(self, key: str, features: EncodedImage) -> None:
        pass

    def find_features(self, key: str) -> None:
        return None

    def keep_prefix(self, elements: Elements, source: Source[Any, Any], salt: str) -> None:
        pass

    def find_prefix(
        self, elements: Elements, known: int, limit: int, salt: str, least: int
    ) -> None:
        return None

    def close(self, seconds: float) -> None:
        pass


@dataclass(slots=True)
class Caches:
    """What engine and runner share, by what the caches are of; sizes are in `settings.Cache`.

    layouts: the tokens of pictures and videos, small, by which they can be left undecoded.
    pixels: what the processor made of them. features: what the encoder did. prefixes: KV.
    disk: beneath the latter two; it is put here once, before the first request of a user.
    """

    layouts: LruCache[Any]
    pixels: LruCache[Any]
    features: LruCache[EncodedImage]
    prefixes: PrefixCache[Any, Any]
    disk: DiskTier = field(default_factory=NoDisk)

    @classmethod
    def of(
        cls,
        *,
        layout_bytes: int = 0,
        pixel_bytes: int = 0,
        encoder_bytes: int = 0,
        prefix_bytes: int = 0,
        needs_snapshots: bool = False,
    ) -> Caches:
        """Caches of these sizes; those of none keep nothing."""
        return cls(
            layouts=LruCache("layout", layout_bytes),
            pixels=LruCache("pixel", pixel_bytes),
            features=LruCache("encoder", encoder_bytes),
            prefixes=PrefixCache("prefix", prefix_bytes, needs_snapshots=needs_snapshots),
        )

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.layouts, self.pixels, self.features, self.prefixes, *self.disk.caches)

    @property
    def evictable_bytes(self) -> int:
        """Device memory of what no request uses."""
        return self.features.evictable_bytes + self.prefixes.evictable_bytes

    def evict(self, num_bytes: int) -> int:
        """Free so much device memory, if it can be; prefixes first, which take most. What went."""
        freed = self.prefixes.evict(num_bytes)
        return freed + self.features.evict(num_bytes - freed)

    def keep_features(self, key: str, features: EncodedImage) -> Lease[EncodedImage]:
        """What was just encoded, or what is known as `key` by now."""
        self.disk.keep_features(key, features)
        return self.features.put(key, features, features.size_bytes)

    def find_features(self, key: str) -> Lease[EncodedImage] | None:
        """From memory or disk; may take long."""
        if known := self.features.lease(key):
            return known
        found = self.disk.find_features(key)
        return None if found is None else self.features.put(key, found, found.size_bytes)

    def keep_prefix(self, elements: Elements, source: Source[Any, Any], salt: str) -> None:
        """What was just computed of `elements`."""
        if self.prefixes.limit_bytes:
            self.prefixes.insert(elements, source, salt)
            self.disk.keep_prefix(elements, source, salt)

    def find_prefix(self, elements: Elements, limit: int, salt: str, least: int = 0) -> Prefix:
        """`PrefixCache.match`, of what is in memory or on disk; may take long."""
        match = self.prefixes.match(elements, limit, salt, least)
        found = self.disk.find_prefix(elements, match.length, limit, salt, least)
        if found is None:
            return match
        self.prefixes.insert(elements.part(0, found.length), found, salt)
        return self.prefixes.improve(match, elements, limit, salt, least)
