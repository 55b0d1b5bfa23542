"""All that is kept of what was read, encoded and computed: what engine and runner share.

Knows which cache is for what, and the tier on disk beneath them; knows no tensor and no policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from vlm_server.cache.ledger import Cache, Ledger
from vlm_server.cache.lru import Lease, LruCache
from vlm_server.cache.prefix import PrefixCache, PrefixMatch, Source
from vlm_server.cache.prompt_key import PromptKey

Prefix = PrefixMatch[Any, Any]
"""A prompt's beginning, as KV that only `runner` can read."""


class EncodedImage(Protocol):
    """What an `Encoder` made of one picture: device arrays that only `runner` can read."""

    @property
    def size_bytes(self) -> int: ...


class DiskTier(Protocol):
    """Features and KV that outlive the process. What can't be kept or found is no error.

    What is kept is noted by the engine's thread and written later; what is found is read at
    once, by the thread that asks.
    """

    @property
    def caches(self) -> tuple[Cache, ...]:
        """For the ledger."""
        ...

    def store_features(self, key: str, features: EncodedImage) -> None: ...

    def lease_features(self, key: str) -> EncodedImage | None: ...

    def store_prefix(self, elements: PromptKey, source: Source[Any, Any], salt: str) -> None: ...

    def match_prefix(
        self, elements: PromptKey, known: int, limit: int, salt: str, least: int
    ) -> StoredPrefixSource | None:
        """What reaches further than the first `known` elements, to `least` to `limit` of them."""
        ...

    def close(self, seconds: float) -> None:
        """Write what waits, for so long at most. Nothing can be kept or found any more."""
        ...


class StoredPrefixSource(Source[Any, Any], Protocol):
    """A prompt's first `length` elements, as far as they were asked for."""

    @property
    def length(self) -> int: ...


class NoDisk:
    """The `DiskTier` that has nothing."""

    caches = ()

    def store_features(self, key: str, features: EncodedImage) -> None:
        pass

    def lease_features(self, key: str) -> None:
        return None

    def store_prefix(self, elements: PromptKey, source: Source[Any, Any], salt: str) -> None:
        pass

    def match_prefix(
        self, elements: PromptKey, known: int, limit: int, salt: str, least: int
    ) -> None:
        return None

    def close(self, seconds: float) -> None:
        pass


@dataclass(slots=True)
class Caches:
    """What engine and runner share, by what the caches are of; sizes are in `settings.Cache`.

    token_layouts: the tokens of pictures and videos, small, by which they can be left undecoded.
    pixels: what the processor made of them. features: what the encoder did. prefixes: KV.
    disk: beneath the latter two; it is put here once, before the first request of a user.
    """

    token_layouts: LruCache[Any]
    pixels: LruCache[Any]
    features: LruCache[EncodedImage]
    prefixes: PrefixCache[Any, Any]
    disk: DiskTier = field(default_factory=NoDisk)

    @classmethod
    def of(
        cls,
        *,
        token_layout_bytes: int = 0,
        pixel_bytes: int = 0,
        encoder_bytes: int = 0,
        prefix_bytes: int = 0,
        needs_snapshots: bool = False,
    ) -> Caches:
        """Caches of these sizes; those of none keep nothing."""
        return cls(
            token_layouts=LruCache("layout", token_layout_bytes),
            pixels=LruCache("pixel", pixel_bytes),
            features=LruCache("encoder", encoder_bytes),
            prefixes=PrefixCache("prefix", prefix_bytes, needs_snapshots=needs_snapshots),
        )

    @property
    def ledger(self) -> Ledger:
        return Ledger(
            self.token_layouts, self.pixels, self.features, self.prefixes, *self.disk.caches
        )

    @property
    def evictable_bytes(self) -> int:
        """Device memory of what no request uses."""
        return self.features.evictable_bytes + self.prefixes.evictable_bytes

    def evict(self, num_bytes: int) -> int:
        """Free so much device memory, if it can be; prefixes first, which take most. What went."""
        freed = self.prefixes.evict(num_bytes)
        return freed + self.features.evict(num_bytes - freed)

    def store_features(self, key: str, features: EncodedImage) -> Lease[EncodedImage]:
        """What was just encoded, or what is known as `key` by now."""
        self.disk.store_features(key, features)
        return self.features.put(key, features, features.size_bytes)

    def lease_features(self, key: str) -> Lease[EncodedImage] | None:
        """From memory or disk; may take long."""
        if known := self.features.lease(key):
            return known
        found = self.disk.lease_features(key)
        return None if found is None else self.features.put(key, found, found.size_bytes)

    def store_prefix(self, elements: PromptKey, source: Source[Any, Any], salt: str) -> None:
        """What was just computed of `elements`."""
        if self.prefixes.limit_bytes:
            self.prefixes.insert(elements, source, salt)
            self.disk.store_prefix(elements, source, salt)

    def match_prefix(self, elements: PromptKey, limit: int, salt: str, least: int = 0) -> Prefix:
        """`PrefixCache.match`, of what is in memory or on disk; may take long."""
        match = self.prefixes.match(elements, limit, salt, least)
        found = self.disk.match_prefix(elements, match.length, limit, salt, least)
        if found is None:
            return match
        self.prefixes.insert(elements.part(0, found.length), found, salt)
        return self.prefixes.improve(match, elements, limit, salt, least)
