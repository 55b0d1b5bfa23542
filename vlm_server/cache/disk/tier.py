"""What `Caches` ask of a tier on disk, and the tier that stores nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from vlm_server.cache.cache import Cache, EncodedImage
from vlm_server.cache.prefix import Source
from vlm_server.cache.prompt_key import PromptKey


class StoredPrefixSource(Source[Any, Any], Protocol):
    """A part of a prompt that was read: it has what is before `length`, from some position on."""

    @property
    def length(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StoredPrefixSizes:
    """What the disk has of a prompt's first `length` positions, and what reading it takes.

    size_bytes: of all files, about as much as it takes in memory. largest_bytes: of one of them.
    """

    length: int
    size_bytes: int
    largest_bytes: int


class DiskTier(Protocol):
    """Features and KV that outlive the process. What can't be written or read is a miss.

    `store_*` return at once and are called by the inference thread; what they are given is written
    later. `find_*` read no content, and may be wrong by the time of `load_*`, which read on the
    thread that asks, and raise OutOfMemory if there is no memory for that: the files stay.
    """

    @property
    def caches(self) -> tuple[Cache, ...]:
        """What there is to read and check."""
        ...

    def store_features(self, key: str, features: EncodedImage) -> None: ...

    def find_features(self, key: str) -> int | None:
        """Their bytes, if there are any."""
        ...

    def load_features(self, key: str) -> EncodedImage | None: ...

    def store_prefix(self, prompt: PromptKey, source: Source[Any, Any], salt: str) -> None: ...

    def find_prefix(
        self, prompt: PromptKey, known: int, limit: int, salt: str, least: int
    ) -> StoredPrefixSizes | None:
        """A longer beginning than the first `known` positions, of `least` to `limit` of them.

        Looks for what other engines have stored, features too: call it before `find_features`.
        """
        ...

    def load_prefix(
        self, prompt: PromptKey, known: int, limit: int, salt: str
    ) -> Iterator[StoredPrefixSource]:
        """What there is after the first `known` positions, file by file, in order.

        Each is read when it is asked for; the one before should be stored by then.
        """
        ...

    def close(self, seconds: float) -> None:
        """Write what waits, for `seconds` at most. After that nothing can be stored or loaded."""
        ...


class NoDisk:
    """The `DiskTier` that stores nothing."""

    caches = ()

    def store_features(self, key: str, features: EncodedImage) -> None:
        pass

    def find_features(self, key: str) -> None:
        return None

    def load_features(self, key: str) -> None:
        return None

    def store_prefix(self, prompt: PromptKey, source: Source[Any, Any], salt: str) -> None:
        pass

    def find_prefix(self, prompt: PromptKey, known: int, limit: int, salt: str, least: int) -> None:
        return None

    def load_prefix(
        self, prompt: PromptKey, known: int, limit: int, salt: str
    ) -> Iterator[StoredPrefixSource]:
        return iter(())

    def close(self, seconds: float) -> None:
        pass
