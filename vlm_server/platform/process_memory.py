"""The engine process's own memory, as the system counts it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from vlm_server.platform import heap
from vlm_server.platform.child import footprint

logger = logging.getLogger(__name__)

_OOM_SCORE = Path("/proc/self/oom_score_adj")
_OOM_SCORE_ADJ = 500
"""Of 1,000: half of the machine's memory more than the process takes."""


def be_killed_first(path: Path = _OOM_SCORE) -> None:
    """Have Linux kill this process, and those it starts, before others when memory runs out.

    The front then starts another engine. Killed itself, it would take everything with it.
    """
    if sys.platform != "linux":
        return
    try:
        if int(path.read_text()) < _OOM_SCORE_ADJ:
            path.write_text(str(_OOM_SCORE_ADJ))
    except (OSError, ValueError) as error:
        logger.debug("can't raise oom_score_adj: %s", error)


class SystemProcessMemory:
    """The `ProcessMemory` of this process."""

    def footprint_bytes(self) -> int:
        return footprint.footprint_bytes()

    def trim(self) -> None:
        heap.trim()
