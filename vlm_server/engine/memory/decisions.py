"""What the governor may decide, and what it decides about. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ClearReason = Literal[
    "idle",
    "guard",
    "chunk",
    "prefill",
    "decode",
    "others",
    "admission",
    "failure",
    "limit",
    "operator",
]


@dataclass(frozen=True, slots=True)
class Keep:
    """Go on; nothing has to be freed."""


@dataclass(frozen=True, slots=True)
class Clear:
    """Give the pool back to the system."""

    reason: ClearReason


@dataclass(frozen=True, slots=True)
class Evict:
    """Evict `num_bytes` from the caches, the least recently used first."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now: memory that others hold is needed."""


@dataclass(frozen=True, slots=True)
class Refuse:
    """Never: it needs more than there is even if it runs alone. Sizes in bytes."""

    needed_bytes: int
    free_bytes: int


Decision = Keep | Clear | Evict | Wait | Refuse


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request will take, in bytes.

    `resident_bytes` until it ends, beside those that run now. `transient_bytes` more, as learned,
    at the worst moment of it and of all that were admitted and do not decode yet. `alone_bytes` is
    what it needs whoever else runs; it is no estimate.
    """

    resident_bytes: int
    transient_bytes: int
    alone_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.resident_bytes + self.transient_bytes
