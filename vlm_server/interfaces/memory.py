"""The interfaces of memory for the governor: the device's allocator, and the process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Device memory in bytes."""

    active_bytes: int
    """The memory of arrays."""
    pool_bytes: int
    """Freed memory that the allocator keeps for reuse."""
    limit_bytes: int


class DeviceMemory(Protocol):
    """The device's allocator. All calls come from the runner's thread."""

    @property
    def is_shared(self) -> bool:
        """Whether device memory is the machine's own, which all programs share."""

    @property
    def trims_own_pool(self) -> bool:
        """Whether the allocator frees its pool by itself before it exceeds the limit."""

    def read(self) -> MemoryReading: ...

    def set_limit(self, limit_bytes: int) -> None:
        """Bound the bytes of arrays from now on; frees nothing."""

    def read_peak(self) -> int:
        """The peak of active bytes since the last call."""

    def synchronize(self) -> None:
        """Wait for running work, which may still hold released memory."""

    def clear(self) -> None:
        """Give the pool back to the system after running work is done."""

    def is_short(self) -> bool:
        """Whether other programs need memory. A query of driver or system, which takes time."""

    def device_used_bytes(self) -> int:
        """Bytes in use by all programs, by the driver's report; 0 for shared memory. Takes time."""


class ProcessMemory(Protocol):
    """The memory of the process."""

    def footprint_bytes(self) -> int:
        """The memory of the process in bytes, as the system counts it."""

    def trim(self) -> None:
        """Give free host memory back to the system; takes milliseconds."""
