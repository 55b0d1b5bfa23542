"""The engine process's own memory, as the system counts it."""

from __future__ import annotations

from vlm_server import heap
from vlm_server.worker import footprint


class SystemProcessMemory:
    """The `ProcessMemory` of this process."""

    def footprint_bytes(self) -> int:
        return footprint.footprint_bytes()

    def trim(self) -> None:
        heap.trim()
