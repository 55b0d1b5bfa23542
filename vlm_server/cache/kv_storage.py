"""How caches store KV, and perhaps running sequences: exactly, or with fewer bits."""

from __future__ import annotations

from dataclasses import dataclass

EXACT_BITS = 16
"""`cache.kv_bits` of KV that is stored as computed, whatever its type."""


@dataclass(frozen=True, slots=True)
class KVStorage:
    """Bits per number of stored KV, and the maximum number of numbers that share a scale.

    of_running: whether running sequences hold KV that way, too.
    """

    bits: int = EXACT_BITS
    group_size: int = 64
    of_running: bool = False

    @property
    def is_exact(self) -> bool:
        return self.bits >= EXACT_BITS

    @property
    def namespace(self) -> str:
        """What distinguishes the salts of prompts stored this way; empty for exact KV."""
        if self.is_exact:
            return ""
        of_all = ", of running sequences too" if self.of_running else ""
        return f"{self.bits} bits in groups of {self.group_size}{of_all}\0"

    @property
    def running(self) -> KVStorage:
        """How running sequences hold KV."""
        return self if self.of_running and not self.is_exact else EXACT


EXACT = KVStorage()
