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
        """Whether it is the machine's own, which all programs need, even while this one idles."""
        ...

    @property
    def trims_own_pool(self) -> bool:
        """Whether it frees what it keeps for reuse by itself before it exceeds its limit."""
        ...

    def read(self) -> MemoryReading: ...

    def set_limit(self, limit_bytes: int) -> None:
        """Let arrays take at most so many bytes from now on; frees nothing."""
        ...

    def take_peak(self) -> int:
        """The most bytes that arrays held since the last call."""
        ...

    def settle(self) -> None:
        """Wait until what is under way is done: it may hold memory that was released."""
        ...

    def clear(self) -> None:
        """Give what is kept for reuse back to the system, once what is under way is done."""
        ...

    def is_short(self) -> bool:
        """Whether other programs need some of it. Asks the driver or the system: takes time."""
        ...

    def device_used_bytes(self) -> int:
        """What all programs use, as the driver says; 0 if device memory is the machine's.

        Asks the driver, which takes time.
        """
        ...


class ProcessMemory(Protocol):
    """The process as the system sees it."""

    def footprint_bytes(self) -> int:
        """What the system counts for the process."""
        ...

    def trim(self) -> None:
        """Give free host memory back to the system; takes milliseconds."""
        ...
