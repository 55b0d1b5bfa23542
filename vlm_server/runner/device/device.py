"""The device that MLX computes on, found once, at start; and how fast it multiplies."""

from __future__ import annotations

import ctypes
import enum
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from vlm_server.platform import machine

logger = logging.getLogger(__name__)

_SYSTEM_BYTES = 6 << 30
"""Memory left to a Mac's system and other programs, which its GPU shares with them."""
_MIN_CAPABILITY = 8
"""Minimum CUDA compute capability for our kernels: Ampere's."""
_SIDE = 512


class DeviceKind(enum.Enum):
    CPU = "cpu"
    CUDA = "cuda"
    METAL = "metal"


@dataclass(frozen=True, slots=True)
class Device:
    """A device and its size. Code that depends on its kind is in its `Backend`.

    name: for logs and cache keys: `cpu`, or the GPU's name.
    memory_bytes: all of its memory; on a CPU, the machine's memory that the process may use.
    suitable_bytes: the part that a program may use without harm to the rest of the machine.
    runs_our_kernels: whether it can run `runner/backends/cuda`.
    """

    kind: DeviceKind
    name: str
    memory_bytes: int
    suitable_bytes: int
    runs_our_kernels: bool = False


def current_device() -> Device:
    """MLX's default device."""
    machine_bytes = machine.memory_bytes()
    device = mx.default_device()
    if device.type == mx.DeviceType.cpu:
        return Device(DeviceKind.CPU, "cpu", machine_bytes, machine_bytes // 2)
    info = mx.device_info(device)
    name = str(info.get("device_name", "gpu"))
    if mx.cuda.is_available():
        total = int(info.get("total_memory", machine_bytes))
        runs_our_kernels = int(info.get("compute_capability_major", 0)) >= _MIN_CAPABILITY
        return Device(DeviceKind.CUDA, name, total, 9 * total // 10, runs_our_kernels)
    total = int(info.get("memory_size", machine_bytes))
    recommended = int(info.get("max_recommended_working_set_size", total))
    return Device(DeviceKind.METAL, name, total, _suitable_bytes(total, recommended))


def _suitable_bytes(total: int, recommended: int) -> int:
    """The suitable part of a Mac's memory: commands fail beyond what Metal recommends."""
    return min(85 * recommended // 100, max(total - _SYSTEM_BYTES, total // 2))


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
