"""The format of log lines in every process: text for people, or JSON for programs."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

import msgspec

Fields = Mapping[str, str | int | float | None]
"""The fields of a log line, by name."""

_FIELDS = "fields"
_MESSAGE = "request"
_encode = msgspec.json.Encoder(enc_hook=str).encode


def formatter(style: str, process: str, start: str = "") -> logging.Formatter:
    """The formatter of a process's lines, in the style `log.format`; text begins with `start`."""
    if style == "json":
        return _JsonFormatter(process)
    return logging.Formatter(f"{start}%(asctime)s {process} %(levelname)s %(message)s")


def log_fields(logger: logging.Logger, level: int, fields: Fields) -> None:
    """A line that is made of fields: `a b c=1 d=-` as text, where the first two have no name."""
    logger.log(level, _AsText(fields), extra={_FIELDS: fields})


class _AsText:
    """The fields, made into text only if the line is logged."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields

    def __str__(self) -> str:
        first, second, *others = self._fields.items()
        texts = (f"{name}={'-' if value is None else value}" for name, value in others)
        return " ".join((str(first[1]), str(second[1]), *texts))


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
