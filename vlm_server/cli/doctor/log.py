"""The last lines of the daemon's log, as they may be shown to others.

The daemon logs no contents and no keys. Libraries might; so only lines of the known forms are
taken, and of exceptions only where they were raised and their types.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from vlm_server.cli.doctor.runner import output_of
from vlm_server.cli.doctor.situation import home_folder
from vlm_server.cli.service.files import UNIT

NUM_LINES = 300
_MAX_BYTES = 1 << 20
_MAX_CHARS = 400
_LINE = re.compile(
    r"(?:\r?\x1b\[K)?(?P<start>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \w+ [A-Z]+ )(?P<message>.*)"
)
_MESSAGE = re.compile(r"(?P<start>vlm-server: )(?P<message>.*)")
_FRAME = re.compile(r"\s*File \"[^\"]+\", line \d+(,)? in [\w<>.]+")
_HEADING = re.compile(
    r"Traceback \(most recent call last\):|Fatal Python error: [\w ]+|"
    r"(Current t|T)hread 0x[0-9a-f]+.*\(most recent call first\):"
)
_ERROR = re.compile(r"(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Timeout|Interrupt|Exit))\b(:|$)")
_LONG_QUOTE = re.compile(r"'(?![/~])[^'\n]{25,}'|\"(?![/~])[^\"\n]{25,}\"")
_FIELDS = frozenset(
    [
        "time",
        "process",
        "level",
        "logger",
        "method",
        "route",
        "id",
        "status",
        "finish",
        "ms",
        "ttft_ms",
        "queue_ms",
        "prompt_tokens",
        "cached_tokens",
        "tokens",
        "images",
        "videos",
        "error",
        "key",
        "ignored",
    ]
)
"""Of a JSON line, beside its message: names, counts and times."""


def tail(path: Path | None) -> list[str]:
    """The end of the log: of the file at `path`, or of the service."""
    if path is None and sys.platform == "darwin":
        path = home_folder() / "Library/Logs/vlm-server.log"
    if path is None:
        words = (
            "journalctl",
            "--user",
            "-u",
            UNIT,
            "-n",
            str(NUM_LINES),
            "-o",
            "cat",
            "--no-pager",
        )
        return (output_of(words) or "").splitlines()
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _MAX_BYTES))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def presentable(lines: Iterable[str]) -> list[str]:
    """Those of known forms, with what might be contents taken out; at most `NUM_LINES`."""
    shown, left_out = [], 0
    for line in lines:
        taken = _taken(line)
        if taken is None:
            left_out += bool(line.strip())
        else:
            shown.append(taken[:_MAX_CHARS])
    if left_out:
        shown.append(f"({left_out} lines of other forms are left out)")
    return shown[-NUM_LINES:]


def _taken(line: str) -> str | None:
    if line.startswith("{"):
        return _of_json(line)
    if match := _LINE.fullmatch(line) or _MESSAGE.fullmatch(line):
        return match["start"] + _without_quotes(match["message"])
    if match := _FRAME.match(line) or _HEADING.match(line):
        return match[0]
    if match := _ERROR.match(line):
        return match["type"]
    return None


def _of_json(line: str) -> str | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not (isinstance(found, dict) and {"time", "process", "level", "message"} <= found.keys()):
        return None
    kept = {name: value for name, value in found.items() if name in _FIELDS}
    kept["message"] = _without_quotes(str(found["message"]))
    if trace := found.get("exception"):
        kept["exception"] = list(_of_trace(str(trace).splitlines()))
    return json.dumps(kept)


def _of_trace(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        if match := _FRAME.match(line):
            yield match[0].strip()
        elif match := _ERROR.match(line):
            yield match["type"]


def _without_quotes(message: str) -> str:
    """What stands in quotes may be a client's words, unless it is short or a path."""
    return _LONG_QUOTE.sub("'…'", message)
