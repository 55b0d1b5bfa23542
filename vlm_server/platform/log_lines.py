"""The format of log lines in every process: text for people, or JSON for programs."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

import msgspec

from vlm_server.platform.terminal import CLEAR_LINE, DIM, RED, YELLOW, columns_of, hanging, styled

Fields = Mapping[str, str | int | float | None]
"""The fields of a log line, by name."""

_FIELDS, _SUMMARY = "fields", "summary"
_MESSAGE = "request"
_LINE = "line"
_SERVER_ERROR = 500
_encode = msgspec.json.Encoder(enc_hook=str).encode


_THIRD_PARTY = ("PIL", "asyncio", "filelock", "httpcore", "httpx", "huggingface_hub", "urllib3")
"""Libraries whose lines below a warning say nothing about the daemon."""
LIBRARIES = {"TRANSFORMERS_VERBOSITY": "error", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
"""Environment of processes that import transformers, which logs by itself."""


def set_up(level: str, style: str, process: str, *others: logging.Handler) -> None:
    """Send this process's log to stderr, and to `others`.

    Below `debug`, libraries keep their advice to themselves. Python's warnings are for
    developers, and are shown with `debug` alone.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(style, process))
    logging.basicConfig(level=level.upper(), handlers=[handler, *others])
    logging.captureWarnings(True)
    if level != "debug":
        logging.getLogger("py.warnings").setLevel(logging.ERROR)
        for name in _THIRD_PARTY:
            logging.getLogger(name).setLevel(logging.WARNING)


def formatter(style: str, process: str, stream: TextIO | None = None) -> logging.Formatter:
    """The formatter of a process's lines on `stream` (stderr), in the style `log.format`."""
    if style == "json":
        return _JsonFormatter(process)
    stream = stream or sys.stderr
    kind = _TerminalFormatter if stream.isatty() else _TextFormatter
    return kind(process, stream, is_verbose=style == "verbose")


def log_fields(logger: logging.Logger, level: int, fields: Fields, summary: str) -> None:
    """A line that is made of fields: as JSON; as `a b c=1 d=-`; or as its `summary`, for people."""
    logger.log(level, _AsText(fields), extra={_FIELDS: fields, _SUMMARY: summary})


class PlainFormatter(logging.Formatter):
    """The text alone; of a line of fields its summary."""

    def format(self, record: logging.LogRecord) -> str:
        return getattr(record, _SUMMARY, None) or super().format(record)


class _AsText:
    """The fields, made into text only if the line is logged. The first two have no name."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields

    def __str__(self) -> str:
        first, second, *others = self._fields.items()
        texts = (f"{name}={'-' if value is None else value}" for name, value in others)
        return " ".join((str(first[1]), str(second[1]), *texts))


class _TextFormatter(logging.Formatter):
    """`time process LEVEL message`; a line of fields is its summary, unless it is verbose."""

    def __init__(self, process: str, stream: TextIO, *, is_verbose: bool) -> None:
        super().__init__(self._start(process, stream), self._time_format)
        self._stream = stream
        self._is_verbose = is_verbose

    _time_format: str | None = None

    def _start(self, process: str, stream: TextIO) -> str:
        return f"%(asctime)s {process} %(levelname)s %({_LINE})s"

    def format(self, record: logging.LogRecord) -> str:
        summary = None if self._is_verbose else getattr(record, _SUMMARY, None)
        setattr(record, _LINE, self._written(record, summary or record.getMessage()))
        return super().format(record)

    def _written(self, record: logging.LogRecord, text: str) -> str:
        return text


class _TerminalFormatter(_TextFormatter):
    """`15:42:53  message`, in place of the line of progress; warnings and errors are marked."""

    _time_format = "%H:%M:%S"
    _time_columns = len("15:42:53  ")

    def _start(self, process: str, stream: TextIO) -> str:
        return f"{CLEAR_LINE}{styled('%(asctime)s', DIM, stream)}  %({_LINE})s"

    def _written(self, record: logging.LogRecord, text: str) -> str:
        style = RED if record.levelno >= logging.ERROR else YELLOW
        if record.levelno >= logging.WARNING:
            level = f"{record.levelname.lower()}:"
            wrapped = self._wrapped(f"{level} {text}")
            return f"{styled(level, style, self._stream)}{wrapped.removeprefix(level)}"
        text = self._wrapped(text)
        if (getattr(record, _FIELDS, None) or {}).get("error") is None:
            return text
        is_ours = record.__dict__[_FIELDS]["status"] >= _SERVER_ERROR
        return styled(text, RED if is_ours else YELLOW, self._stream)

    def _wrapped(self, text: str) -> str:
        start, columns = " " * self._time_columns, columns_of(self._stream)
        lines = (hanging(start, line, columns) for line in text.split("\n"))
        return "\n".join(lines)[len(start) :]


class _JsonFormatter(logging.Formatter):
    """One object a line: `time` (UTC), `process`, `level`, `logger`, `message`, and fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, _FIELDS, None)
        line: dict[str, Any] = {
            "time": _utc(record.created),
            "process": self._process,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _written(record.getMessage()) if fields is None else _MESSAGE,
            **(fields or {}),
        }
        if record.exc_info:
            line["exception"] = _written(self.formatException(record.exc_info))
        return _encode(line).decode()


def _written(text: str) -> str:
    """`text` with lone surrogates escaped, so that it can be encoded."""
    return text.encode("utf-8", "backslashreplace").decode()


def _utc(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"
