"""Compiles our CUDA kernels.

MLX compiles a kernel when it is first used, and keeps it for the life of the process.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

WARP = 32
"""Threads."""
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
) -> Any:
    """A kernel of MLX that runs `body`, which calls what the files `sources` have.

    `shared_memory`: bytes. `is_strided`: whether it takes inputs as they lie in memory, rather than
    contiguous.
    """
    return mx.fast.cuda_kernel(
        name=f"vlm_{name}",
        input_names=inputs,
        output_names=outputs,
        source=body,
        header="".join(_code(source) for source in sources),
        ensure_row_contiguous=not is_strided,
        shared_memory=shared_memory,
    )


def _code(name: str) -> str:
    """A source without what people read: MLX hashes all of it at every call."""
    text = re.sub(r"//.*", "", (_FOLDER / name).read_text())
    return re.sub(r"\n\s*", "\n", text)
