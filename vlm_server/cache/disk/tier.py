"""The tier on disk beneath the caches in memory: its interface, and what a request reads from it.

While a request is prepared only the sizes of files are looked up; bytes are read once memory is
reserved for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from vlm_server.cache.lru import Cache, Lease
from vlm_server.cache.prefix import PrefixMatch, Source
from vlm_server.cache.prompt_key import PromptKey


class EncodedImage(Protocol):
    """The encoder's output for one image: device arrays that only `runner` can read."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def tokens_at_once(self) -> int | None:
        """Tokens per encoder call, if the image took several calls; None if it took one."""
        ...


class StoredBlock(Source[Any, Any], Protocol):
    """A stored block of a prompt: positions up to `length`, from some position on."""

    @property
    def length(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StoredPrefixSizes:
    """The stored files of a prompt's first `length` positions.

    size_bytes: of all files, about as much as in memory. largest_bytes: of the largest.
    """

    length: int
    size_bytes: int
    largest_bytes: int


class DiskTier:
    """Features and KV that outlive the process. This base class stores nothing.

    A failed write or read is a miss. `store_*` return at once and are called by the inference
    thread; their arguments are written later. `find_*` read no content, and may be outdated by the
    time of `read_*`, which read on the calling thread, and raise OutOfMemory if memory is short:
    the files stay.
    """

    @property
    def caches(self) -> tuple[Cache, ...]:
        """The caches whose statistics and integrity can be read."""
        return ()

    def store_features(self, key: str, features: EncodedImage) -> None:
        """Write the features of the image named `key`."""

    def find_features(self, key: str) -> int | None:
        """Bytes of the stored features; None if there are none."""
        return None

    def read_features(self, key: str) -> EncodedImage | None:
        """The stored features; None if there are none."""
        return None

    def store_prefix(self, prompt: PromptKey, source: Source[Any, Any], salt: str) -> None:
        """Write the KV of `prompt`, except blocks that are stored already."""

    def find_prefix(
        self, prompt: PromptKey, known: int, limit: int, salt: str, least: int
    ) -> StoredPrefixSizes | None:
        """A stored prefix longer than `known` positions, of `least` to `limit` positions.

        Also indexes what other engines have stored, features too: call it before `find_features`.
        """
        return None

    def read_prefix(
        self, prompt: PromptKey, known: int, limit: int, salt: str
    ) -> Iterator[StoredBlock]:
        """The stored blocks after the first `known` positions, in order.

        Each file is read when its block is asked for; the block before should be stored by then.
        """
        return iter(())

    def close(self, seconds: float) -> None:
        """Write the queue, for `seconds` at most. After that nothing can be stored or read."""


@dataclass(frozen=True, slots=True)
class DiskRead:
    """The stored parts of a prompt that are not in memory.

    prefix_tokens: length of the stored prefix, of which `least` to `limit` tokens are usable; 0 for
    none. features: keys of the media after it, by span. size_bytes: of all that in memory.
    transient_bytes: needed in addition while it is read.
    """

    key: PromptKey
    salt: str
    limit: int
    least: int
    prefix_tokens: int
    features: Mapping[int, str]
    size_bytes: int
    transient_bytes: int

    def covers(self, index: int) -> bool:
        """Whether the media of span `index` need neither features nor pixels if all can be read."""
        return index in self.features or self.key.spans[index].start < self.prefix_tokens


@dataclass(slots=True)
class DiskReadResult:
    """The result of a `DiskRead`: in memory, pinned until it is taken over or released."""

    prefix: PrefixMatch[Any, Any] | None = None
    features: dict[int, Lease[EncodedImage]] = field(default_factory=dict)
    is_out_of_memory: bool = False
    """Whether memory was short for the rest."""

    def release(self) -> None:
        """Unpin all of it."""
        for lease in self.features.values():
            lease.release()
        if self.prefix is not None:
            self.prefix.release()
        self.features, self.prefix = {}, None
