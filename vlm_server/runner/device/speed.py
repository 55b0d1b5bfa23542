"""Measures how fast a CPU multiplies matrices, and warns if that is slow."""

from __future__ import annotations

import logging
import time

import mlx.core as mx

from vlm_server.runner.device.device import Device

logger = logging.getLogger(__name__)

_SIDE = 512
_SLOW_GFLOPS = 15.0
"""MLX's own CPU products run at about 5 GFLOP/s, with an OpenBLAS at 100 and more."""


def product_gflops() -> float:
    """Speed of a float32 product of 512x512 matrices, the best of three, in GFLOP/s."""
    matrix = mx.ones((_SIDE, _SIDE))
    mx.eval(matrix @ matrix)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        mx.eval(matrix @ matrix)
        seconds.append(time.perf_counter() - started)
    return 2 * _SIDE**3 / min(seconds) / 1e9


def warn_of_slow_products(device: Device) -> None:
    """Log how fast a CPU multiplies, and warn if that can't be an OpenBLAS."""
    if not device.is_cpu:
        return
    speed = product_gflops()
    logger.info("this CPU multiplies matrices at %.0f GFLOP/s", speed)
    if speed < _SLOW_GFLOPS:
        logger.warning("that is slow: no OpenBLAS was preloaded, see engine.openblas")
