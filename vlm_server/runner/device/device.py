"""The device that MLX computes on: made once at start, and passed to whoever depends on it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import mlx.core as mx

from vlm_server.platform import machine

CUDA_BLOCK_TOKENS = 256
"""More than `KVCache.step` would not fit into a cache's room."""


MAX_DRAFTING_ROWS = 8
"""More rows keep a device busy without drafts."""
_FULL_SHARE = 32
"""If less than this part of a device (one in so many) is free, another program may need some."""
_SYSTEM_BYTES = 6 << 30
"""Need of a Mac's system and other programs, of the memory that a GPU shares with them."""
_LEAST_CAPABILITY = 8
"""CUDA's compute capability that our kernels need: Ampere's."""


class DeviceKind(enum.Enum):
    CPU = "cpu"
    CUDA = "cuda"
    METAL = "metal"


@dataclass(frozen=True, slots=True)
class Device:
    """A device: its size, what suits it, and what it can do.

    name: for people and for cache keys: `cpu`, or the GPU's name.
    memory_bytes: all that it has; a CPU's is what the process may use of the machine's.
    suitable_bytes: what a program may use of it without harm to the rest of the machine.
    runs_our_kernels: whether it runs those of `runner/backends/cuda`.
    """

    kind: DeviceKind
    name: str
    memory_bytes: int
    suitable_bytes: int
    runs_our_kernels: bool = False

    @property
    def is_cpu(self) -> bool:
        return self.kind is DeviceKind.CPU

    @property
    def shares_memory(self) -> bool:
        """Whether it is a GPU whose memory is the machine's."""
        return self.kind is DeviceKind.METAL

    @property
    def trims_own_pool(self) -> bool:
        """Whether its allocator frees what it keeps for reuse before it exceeds its limit.

        MLX's allocators for GPUs do, buffer by buffer; the one for CPUs does not.
        """
        return not self.is_cpu

    @property
    def is_filled_by_a_tile(self) -> bool:
        """Whether encoding a picture's tiles one after the other takes no longer than at once.

        Not on CUDA, where launching kernels for so few patches takes longer than running them.
        """
        return self.kind is not DeviceKind.CUDA

    @property
    def prefill_padding_tokens(self) -> int:
        """The number of which long prefill chunks are padded to a multiple; 1 for no padding.

        On CUDA, the least block of `backends.cuda.attention`.
        """
        return CUDA_BLOCK_TOKENS if self.kind is DeviceKind.CUDA else 1

    @property
    def compiles_towers(self) -> bool:
        """Whether vision towers are compiled, for each size of images.

        On CUDA, the host takes longer to launch their kernels than the device to run them.
        """
        return self.kind is DeviceKind.CUDA

    @property
    def mixed_step_tokens(self) -> int:
        """The number of tokens of a mixed step; 0 where chunks are read after the decode step.

        On CUDA, launching a pass takes most of its time: 256 tokens take two thirds as long as 640.
        """
        return 640 if self.kind is DeviceKind.CUDA else 0

    @property
    def encodes_in_turns(self) -> bool:
        """Whether media are encoded by the thread that decodes, in parts between its steps.

        Else another thread encodes them meanwhile: a CPU does both at once. On a GPU, a decode step
        would take as long as the encode.
        """
        return not self.is_cpu

    @property
    def tells_errors_late(self) -> bool:
        """Whether a computation can fail after it was launched; see `faults`."""
        return self.kind is DeviceKind.METAL

    @property
    def draft_widths(self) -> tuple[int, ...]:
        """The numbers of tokens of a sequence that a step may take to verify drafts.

        On CUDA, 16 take as long as two: launching the kernels takes most of a step. Metal's
        attention of few queries takes up to 8.
        """
        match self.kind:
            case DeviceKind.CPU:
                return (2, 3, 4, 6, 8, 12, 16)
            case DeviceKind.METAL:
                return (2, 4, 8)
            case DeviceKind.CUDA:
                return (16,)

    def is_short_of_memory(self) -> bool:
        """Whether other programs need memory: little of the device is free, or the system says so.

        Takes time. Never for a CPU, whose system takes back what is not used.
        """
        if self.kind is DeviceKind.METAL:
            return machine.memory_pressure() > machine.NO_PRESSURE
        used = self.used_bytes()
        return used > 0 and self.memory_bytes - used < self.memory_bytes // _FULL_SHARE

    def used_bytes(self) -> int:
        """The memory that all programs use of a CUDA device, as its driver says.

        0 for a CPU and for Metal, whose memory is the machine's.
        """
        if self.kind is not DeviceKind.CUDA:
            return 0
        info = mx.device_info(mx.default_device())
        return int(info["total_memory"]) - int(info["free_memory"]) if "free_memory" in info else 0


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
        runs_our_kernels = int(info.get("compute_capability_major", 0)) >= _LEAST_CAPABILITY
        return Device(DeviceKind.CUDA, name, total, 9 * total // 10, runs_our_kernels)
    total = int(info.get("memory_size", machine_bytes))
    recommended = int(info.get("max_recommended_working_set_size", total))
    return Device(DeviceKind.METAL, name, total, _suitable_bytes(total, recommended))


def _suitable_bytes(total: int, recommended: int) -> int:
    """The suitable part of a Mac's memory: commands fail beyond what Metal recommends."""
    return min(85 * recommended // 100, max(total - _SYSTEM_BYTES, total // 2))
