"""What a request wants read from disk, and what was read of it.

A request that is prepared is only told what there is: bytes are read once memory is reserved for
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vlm_server.cache.cache import EncodedImage
from vlm_server.cache.lru import Lease
from vlm_server.cache.prefix import PrefixMatch
from vlm_server.cache.prompt_key import PromptKey


@dataclass(frozen=True, slots=True)
class DiskLoad:
    """What there is of a prompt that memory has not.

    prefix_tokens: KV of so many of its first tokens, at most `limit` and at least `least` of which
    are of use; 0 for none. features: keys of those of media after them, by span. size_bytes: of all
    that in memory. transient_bytes: beside it while it is read.
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
class Loaded:
    """What could be read: in memory, pinned until it is taken over or released."""

    prefix: PrefixMatch[Any, Any] | None = None
    features: dict[int, Lease[EncodedImage]] = field(default_factory=dict)
    is_out_of_memory: bool = False
    """Whether memory was short for more."""

    def release(self) -> None:
        """Let the caches evict all of it."""
        for lease in self.features.values():
            lease.release()
        if self.prefix is not None:
            self.prefix.release()
        self.features, self.prefix = {}, None
