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
