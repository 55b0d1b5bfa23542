"""The tier on disk beneath the caches in memory: its interface, and a request's reads from it.

Preparation looks up only the sizes of files; their content is read once memory is reserved for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from vlm_server.cache.lru import InspectableCache, Lease
from vlm_server.cache.prefix import PrefixMatch, Source
from vlm_server.cache.prompt_key import PromptKey


class EncodedImage(Protocol):
    """The encoder's output for one image: device arrays that only `runner` can read."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def tokens_per_call(self) -> int | None:
        """Tokens per encoder call, if the image took several calls; None if it took one."""


class StoredBlock(Source[Any, Any], Protocol):
    """A stored block of a prompt: positions up to `length`, from some position on."""

    @property
    def length(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StoredPrefixSizes:
    """The sizes of the stored files of a prompt's first `length` positions."""

    length: int
    size_bytes: int
    """The size of all files; the size in memory is about the same."""
    largest_bytes: int
    """The size of the largest file."""


class DiskTier:
    """Features and KV that outlive the process. This base class stores nothing.

    A failed write or read is a miss. `store_*` are called by the inference thread and return
    immediately; their arguments are written later. `find_*` read no content, and their results may
    be outdated when `read_*` are called, which read on the calling thread and raise OutOfMemory if
    memory is short; the files stay.
    """

    @property
    def caches(self) -> tuple[InspectableCache, ...]:
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
        self, prompt: PromptKey, start: int, limit: int, salt: str, min_length: int
    ) -> StoredPrefixSizes | None:
        """A stored prefix longer than `start` positions, of `min_length` to `limit` positions.

        Also indexes files that other engines stored, features included: call it before
        `find_features`.
        """
        return None

    def read_prefix(
        self, prompt: PromptKey, start: int, limit: int, salt: str
    ) -> Iterator[StoredBlock]:
        """The stored blocks after the first `start` positions, in order.

        Each file is read when its block is requested; by then the block before should be stored.
        """
        return iter(())

    def close(self, seconds: float) -> None:
        """Write the queue, for at most `seconds`. Afterwards nothing can be stored or read."""


@dataclass(frozen=True, slots=True)
class DiskRead:
    """The parts of a prompt to read from disk: stored there, and not in memory."""

    key: PromptKey
    salt: str
    limit: int
    """The maximum number of usable prefix tokens."""
    prefix_tokens: int
    """The length of the stored prefix; 0 for none."""
    features: Mapping[int, str]
    """Keys of the media after the prefix, by span."""
    size_bytes: int
    """The size of all parts in memory."""
    transient_bytes: int
    """Additional memory needed during the read."""

    def covers(self, index: int) -> bool:
        """Whether the media of span `index` need neither features nor pixels if all can be read."""
        return index in self.features or self.key.spans[index].start < self.prefix_tokens


@dataclass(slots=True)
class DiskReadResult:
    """The result of a `DiskRead`: entries in memory, pinned until taken over or released."""

    prefix: PrefixMatch[Any, Any] | None = None
    features: dict[int, Lease[EncodedImage]] = field(default_factory=dict)
    is_out_of_memory: bool = False
    """Whether the rest was not read for lack of memory."""

    def release(self) -> None:
        """Unpin all entries."""
        for lease in self.features.values():
            lease.release()
        if self.prefix is not None:
            self.prefix.release()
        self.features, self.prefix = {}, None
