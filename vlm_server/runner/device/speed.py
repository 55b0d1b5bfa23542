"""Measures a CPU's matrix products, and warns if MLX has no BLAS for them."""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from pathlib import Path

import mlx.core as mx

logger = logging.getLogger(__name__)

_SIDE = 512


def product_gflops() -> float:
    """Speed of a float32 product of 512x512 matrices, the best of three, in GFLOP/s."""
    matrix = mx.ones((_SIDE, _SIDE))
    mx.eval(matrix @ matrix)
    seconds = []
    for _ in range(3):
        started_at = time.perf_counter()
        mx.eval(matrix @ matrix)
        seconds.append(time.perf_counter() - started_at)
    return 2 * _SIDE**3 / min(seconds) / 1e9


def has_openblas() -> bool:
    """Whether this process was started with an OpenBLAS, which MLX calls on Linux."""
    return hasattr(ctypes.CDLL(None), "openblas_get_config")


def blas_libraries() -> list[str]:
    """Files of the BLAS libraries that this process has loaded, on Linux; empty elsewhere."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    return sorted(file for file in files if "blas" in Path(file).name.lower())


def warn_of_slow_products() -> None:
    """Warn without OpenBLAS.

    The speed is no criterion: on a busy machine OpenBLAS is slow, too.
    """
    if sys.platform == "linux" and not has_openblas():
        text = "no OpenBLAS was preloaded: matrices are multiplied at %.0f GFLOP/s, see %s"
        logger.warning(text, product_gflops(), "engine.openblas")
