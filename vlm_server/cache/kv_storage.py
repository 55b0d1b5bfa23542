"""How the prefix cache and the disk cache store KV: exactly, or with fewer bits."""

from __future__ import annotations

from dataclasses import dataclass

EXACT_BITS = 16
"""`cache.kv_bits` of KV that is stored as computed, whatever its type."""


@dataclass(frozen=True, slots=True)
class KVStorage:
    """Bits per number of stored KV, and the maximum number of numbers that share a scale."""

    bits: int = EXACT_BITS
    group_size: int = 64

    @property
    def is_exact(self) -> bool:
        return self.bits >= EXACT_BITS

    @property
    def namespace(self) -> str:
        """What distinguishes the salts of prompts stored this way; empty for exact KV."""
        return "" if self.is_exact else f"{self.bits} bits in groups of {self.group_size}\0"


EXACT = KVStorage()
