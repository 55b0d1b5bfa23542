"""Memory as the governor sees it: the device's allocator, and the process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Device memory in bytes: held by arrays, freed and kept for reuse, and what may be used."""

    active_bytes: int
    pool_bytes: int
    limit_bytes: int


class DeviceMemory(Protocol):
    """The device's allocator. All calls come from the runner's thread."""

    @property
    def is_shared(self) -> bool:
        """Whether device memory is the machine's own, which all programs share."""
        ...

    @property
    def trims_own_pool(self) -> bool:
        """Whether it frees its pool by itself before it exceeds the limit."""
        ...

    def read(self) -> MemoryReading: ...

    def set_limit(self, limit_bytes: int) -> None:
        """Bound the bytes of arrays from now on; frees nothing."""
        ...

    def read_peak(self) -> int:
        """The peak of active bytes since the last call."""
        ...

    def synchronize(self) -> None:
        """Wait for running work: it may hold memory that was released."""
        ...

    def clear(self) -> None:
        """Give the pool back to the system, once running work is done."""
        ...

    def is_short(self) -> bool:
        """Whether other programs need memory. Asks the driver or the system: takes time."""
        ...

    def device_used_bytes(self) -> int:
        """Bytes in use by all programs, as the driver says; 0 if device memory is the machine's.

        Takes time.
        """
        ...


class ProcessMemory(Protocol):
    """The process as the system sees it."""

    def footprint_bytes(self) -> int:
        """The process's memory as the system counts it."""
        ...

    def trim(self) -> None:
        """Give free host memory back to the system; takes milliseconds."""
        ...
