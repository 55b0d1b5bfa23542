"""The last lines of the log, kept in memory for operators."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

import msgspec

from vlm_server.platform.log_lines import PlainFormatter

MAX_LINES = 500
MAX_CHARS = 2000
"""The longest kept text of a line; the rest is cut off."""
_ENGINE_LINES = logging.getLogger("vlm_server.engine_lines")
"""The logger of lines that an engine process has written itself, and that the front only keeps."""
_CUT = "…"


class KeptLine(msgspec.Struct, frozen=True):
    """A line; `number` counts all lines since the start, from 1, `time` is in seconds since 1970.

    process: `front`, or `engine` with the name of its `model`.
    """

    number: int
    time: float
    process: str
    model: str
    level: str
    text: str


class LogTail(logging.Handler):
    """Keeps the last `MAX_LINES` lines, each of at most `MAX_CHARS` characters."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(PlainFormatter())
        self._lines: deque[KeptLine] = deque(maxlen=MAX_LINES)
        self.num_lines = 0
        """The number of all lines since the start."""
        self._guard = threading.Lock()  # several threads log

    def emit(self, record: logging.LogRecord) -> None:
        model = getattr(record, "model", "")
        process = "engine" if record.name == _ENGINE_LINES.name else "front"
        level, text = record.levelname.lower(), cut(self.format(record))
        with self._guard:
            self.num_lines += 1
            line = KeptLine(self.num_lines, record.created, process, model, level, text)
            self._lines.append(line)

    def after(self, number: int) -> Sequence[KeptLine]:
        """The kept lines after the one with this number, the oldest first."""
        with self._guard:
            return [line for line in self._lines if line.number > number]


def keep_lines() -> LogTail:
    """A tail that gets engines' lines; the caller attaches it to the root logger for the others."""
    tail = LogTail()
    _ENGINE_LINES.propagate = False
    _ENGINE_LINES.handlers = [tail]
    return tail


def keep_engine_line(model: str, created: float, level: int, text: str) -> None:
    """Keep a copy of a line of the engine of `model`; the arguments are as in `LogRecord`."""
    name = _ENGINE_LINES.name
    record = logging.LogRecord(name, level, "", 0, "%s", (text,), None)
    record.created, record.model = created, model
    _ENGINE_LINES.handle(record)


def cut(text: str) -> str:
    """`text` without what is beyond `MAX_CHARS`, and as Unicode that can be encoded."""
    kept = text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + _CUT
    return kept.encode("utf-8", "backslashreplace").decode()
