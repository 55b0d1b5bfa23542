"""What `Caches` ask of a tier on disk, and the tier that stores nothing."""

from __future__ import annotations

from typing import Any, Protocol

from vlm_server.cache.cache import Cache, EncodedImage
from vlm_server.cache.prefix import Source
from vlm_server.cache.prompt_key import PromptKey


class StoredPrefixSource(Source[Any, Any], Protocol):
    """The first `length` positions of a prompt, as far as they were asked for."""

    @property
    def length(self) -> int: ...


class DiskTier(Protocol):
    """Features and KV that outlive the process. What can't be written or read is a miss.

    `store_*` return at once and are called by the inference thread; what they are given is written
    later. `load_*` read on the thread that asks.
    """

    @property
    def caches(self) -> tuple[Cache, ...]:
        """What there is to read and check."""
        ...

    def store_features(self, key: str, features: EncodedImage) -> None: ...

    def load_features(self, key: str) -> EncodedImage | None: ...

    def store_prefix(self, prompt: PromptKey, source: Source[Any, Any], salt: str) -> None: ...

    def load_prefix(
        self, prompt: PromptKey, known: int, limit: int, salt: str, least: int
    ) -> StoredPrefixSource | None:
        """A longer beginning than the first `known` positions, of `least` to `limit` of them."""
        ...

    def close(self, seconds: float) -> None:
        """Write what waits, for `seconds` at most. After that nothing can be stored or loaded."""
        ...


class NoDisk:
    """The `DiskTier` that stores nothing."""

    caches = ()

    def store_features(self, key: str, features: EncodedImage) -> None:
        pass

    def load_features(self, key: str) -> None:
        return None

    def store_prefix(self, prompt: PromptKey, source: Source[Any, Any], salt: str) -> None:
        pass

    def load_prefix(self, prompt: PromptKey, known: int, limit: int, salt: str, least: int) -> None:
        return None

    def close(self, seconds: float) -> None:
        pass
