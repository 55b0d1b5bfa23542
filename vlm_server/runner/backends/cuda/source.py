"""Makes our CUDA kernels from their sources, and holds the constants of attention_tiles.cuh.

A kernel is compiled when it is first used with inputs of such types: see `compiler`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vlm_server.runner.backends.cuda.compiler import Kernel

WARP = 32
"""Threads of a warp."""
TILE_SOURCES = ("mma.cuh", "attention_tiles.cuh")
QUERIES_OF_A_WARP = 16
MOST_WARPS = 4
"""Warps of a block of threads."""
_TILE_KEYS = 64
"""Keys of a tile: KEYS in attention_tiles.cuh."""
_FOLDER = Path(__file__).parent


def kernel(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    body: str,
    sources: Sequence[str],
    shared_memory: int = 0,
    *,
    is_strided: bool = True,
) -> Kernel:
    """A kernel that runs `body`, which calls functions of the files `sources`.

    `shared_memory`: bytes. `is_strided`: whether it takes inputs with any strides rather than
    contiguous.
    """
    return Kernel(
        f"vlm_{name}",
        inputs,
        outputs,
        body,
        "".join(_code(source) for source in sources),
        shared_memory=shared_memory,
        is_strided=is_strided,
    )


def _code(name: str) -> str:
    """A source without comments and indentation: MLX hashes all of it at every call."""
    text = re.sub(r"//.*", "", (_FOLDER / name).read_text())
    return re.sub(r"\n\s*", "\n", text)


def tile_bytes(size: int) -> int:
    """Bytes of a tile in a block's shared memory. `size`: of a head."""
    return _TILE_KEYS * (size + 8) * 2


def values_of_block(size: int) -> int:
    """`values_of_block` in attention_tiles.cuh."""
    return min(size, 128)


def name_of(scale: float) -> str:
    """Part of the name of a kernel that has `scale` in its source."""
    return np.float32(scale).tobytes().hex()


def literal_of(scale: float) -> str:
    """`scale` in a kernel's source."""
    return f"{np.float32(scale)!s}f"
