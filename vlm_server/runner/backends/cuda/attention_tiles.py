"""What kernels that use attention_tiles.cuh have in common."""

from __future__ import annotations

import numpy as np

TILE_SOURCES = ("mma.cuh", "attention_tiles.cuh")
QUERIES_OF_A_WARP = 16
MOST_WARPS = 4
"""Of a block of threads."""
_TILE_KEYS = 64
"""As KEYS in attention_tiles.cuh."""


def tile_bytes(size: int) -> int:
    """What a tile of keys or values takes of a block's shared memory. `size`: of a head."""
    return _TILE_KEYS * (size + 8) * 2


def name_of(scale: float) -> str:
    """For the name of a kernel that has `scale` in its source."""
    return np.float32(scale).tobytes().hex()


def literal_of(scale: float) -> str:
    """`scale` in a kernel's source."""
    return f"{np.float32(scale)!s}f"
