"""The device that MLX computes on: found once, at start."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import mlx.core as mx

from vlm_server.platform import machine

_SYSTEM_BYTES = 6 << 30
"""Memory left to a Mac's system and other programs, which its GPU shares with them."""
_MIN_CAPABILITY = 8
"""Minimum CUDA compute capability for our kernels: Ampere's."""


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
