"""What every cache can be asked, and what the encoder cache stores."""

from __future__ import annotations

from typing import Protocol

from vlm_server.protocol import CacheStats


class Cache(Protocol):
    """What every cache can be asked, from any thread."""

    def read(self) -> CacheStats: ...

    def check_integrity(self) -> None:
        """Raises AssertionError if what it counts is not what it stores."""
        ...


class EncodedImage(Protocol):
    """What an `Encoder` made of one image: device arrays that only `runner` can read."""

    @property
    def size_bytes(self) -> int: ...

    @property
    def tokens_at_once(self) -> int | None:
        """How many of its tokens were encoded in one call, of several; None if all were."""
        ...
