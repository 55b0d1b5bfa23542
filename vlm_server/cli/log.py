"""The daemon's log: its lines on a terminal and in a file, and bounds on both."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vlm_server.errors import ConfigError
from vlm_server.platform import log_lines
from vlm_server.platform.log_tail import LogTail, keep_lines
from vlm_server.settings import Log, Settings, Sources

MAX_BYTES = 10 << 20
NUM_OLDER = 3
_ACCESS_LOGGER = "vlm_server.api"
_LOADING_LOGGER = "vlm_server.supervisor.supervisor"
_EASILY_REPEATED = (
    "asyncio",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
    "uvicorn.error",
    "vlm_server.api.http.connection.exchange",
    "vlm_server.api.http.connection.protocol",
    "vlm_server.api.parsing.body_parser",
)
"""Loggers that clients could make write any number of lines."""
_MAX_KINDS = 256


def with_terminal_log(settings: Settings, sources: Sources) -> Settings:
    """`settings` with a log for a terminal: warnings and requests, unless more was asked for."""
    is_chosen = "log.level" in sources or settings.log.format == "verbose"
    if is_chosen or not sys.stderr.isatty():
        return settings
    logging.getLogger(_ACCESS_LOGGER).setLevel(logging.INFO)
    logging.getLogger(_LOADING_LOGGER).addFilter(_is_no_error)
    return msgspec.structs.replace(
        settings, log=msgspec.structs.replace(settings.log, level="warning")
    )


def has_started() -> None:
    """The log errors of loading from now on; before, they are the last line of `serve`."""
    logging.getLogger(_LOADING_LOGGER).removeFilter(_is_no_error)


def _is_no_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


def set_up_logging(log: Log) -> LogTail:
    """Send log lines to stderr; on a terminal they replace the progress line.

    Returns what keeps the last ones, those of engines too.
    """
    tail = keep_lines()
    log_lines.set_up(log.level, log.format, "front", tail)
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.root.level))
    rate = LogRate()
    for name in _EASILY_REPEATED:
        logging.getLogger(name).addFilter(rate)
    return tail


@dataclass(slots=True)
class _Recent:
    since: float
    lines: int = 0
    left_out: int = 0


class LogRate(logging.Filter):
    """A filter that passes `lines` lines of a kind within `seconds`, and counts the others.

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
            if len(self._kinds) >= _MAX_KINDS:
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


class LogFile:
    """Standard output and error of this process and its children, in a file of bounded size.

    Beyond `max_bytes` it is copied to `path.1`, after `path.1` was moved to `path.2` and so on, and
    emptied, not replaced: children hold it open. A line written during the copy may be lost.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, num_older: int = NUM_OLDER) -> None:
        """Raises ConfigError if the file can't be written."""
        self._path = path
        self._max_bytes = max_bytes
        self._num_older = num_older
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"can't write {path}: {error.strerror}") from None
        sys.stdout.flush()
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        os.close(file)

    def rotate_if_large(self) -> None:
        """Rotate the file if it is large. Failures are retried at the next call."""
        with contextlib.suppress(OSError):
            if os.path.getsize(self._path) > self._max_bytes:
                self._rotate()

    def _rotate(self) -> None:
        draft = self._path.with_name(f".{self._path.name}.draft")
        draft.unlink(missing_ok=True)
        draft.touch(mode=0o600)
        shutil.copyfile(self._path, draft)
        for number in range(self._num_older, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._older(number - 1), self._older(number))
        draft.replace(self._older(1))
        os.truncate(self._path, 0)

    def _older(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
