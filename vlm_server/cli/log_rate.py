"""Keeps a log readable, and the disk from filling, when one thing goes wrong again and again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

_MOST_KINDS = 256


@dataclass(slots=True)
class _Recent:
    since: float
    lines: int = 0
    left_out: int = 0


class LogRate(logging.Filter):
    """Lets pass `lines` lines of a kind within `seconds`; says later how many it left out.

    A kind is a logger, a level and the beginning of the text before its values are filled in.
    """

    def __init__(
        self, lines: int = 5, seconds: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._lines = lines
        self._seconds = seconds
        self._clock = clock
        self._kinds: dict[tuple[str, int, str], _Recent] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether `record` is written."""
        kind, now = (record.name, record.levelno, str(record.msg)[:40]), self._clock()
        recent = self._kinds.get(kind)
        if recent is None:
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            recent = self._kinds[kind] = _Recent(now)
        if now - recent.since >= self._seconds:
            if recent.left_out:
                record.msg = f"{record.msg} (and {recent.left_out} more like it)"
            recent.since, recent.lines, recent.left_out = now, 0, 0
        recent.lines += 1
        if recent.lines > self._lines:
            recent.left_out += 1
            return False
        return True
