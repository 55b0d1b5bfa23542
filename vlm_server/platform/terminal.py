"""What a terminal can show: styles, and lines of its width."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import textwrap
from typing import TextIO

CLEAR_LINE = "\r\x1b[K"
"""Removes a line of progress."""
BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"
"""Styles, as parameters of the escape sequence SGR."""
_USUAL_SIZE = os.terminal_size((80, 24))
_MIN_COLUMNS = 16
_QUOTED = re.compile(r"(?<!\w)(['`\"])[^'`\"]+\1(?!\w)")
_UNBROKEN = "\0"
"""Stands for a space at which no line ends."""


def has_styles(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that shows styles, and its user wants them (NO_COLOR)."""
    can_style = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return can_style and not os.environ.get("NO_COLOR")


def styled(text: str, style: str, stream: TextIO) -> str:
    """`text` in `style`, if `stream` has styles."""
    return f"\x1b[{style}m{text}\x1b[0m" if text and style and has_styles(stream) else text


def columns_of(stream: TextIO) -> int | None:
    """The width of a terminal; None for a file or a pipe, whose lines are not cut or wrapped."""
    if not stream.isatty():
        return None
    size = _USUAL_SIZE
    with contextlib.suppress(OSError):
        size = os.get_terminal_size(stream.fileno())
    return shutil.get_terminal_size(size).columns or _USUAL_SIZE.columns


def hanging(start: str, text: str, columns: int | None, indent: int | None = None) -> str:
    """`start` and `text`, wrapped by words at `columns`; further lines begin below the text's first
    word, or after `indent` columns.

    A quoted command that fits into a line stays in one. A longer word is not broken.
    """
    if columns is None:
        return f"{start}{text}"
    space = " " * (len(start) if indent is None else indent)
    room = max(_MIN_COLUMNS, columns - len(space))

    def kept_together(quoted: re.Match[str]) -> str:
        return quoted[0].replace(" ", _UNBROKEN) if len(quoted[0]) <= room else quoted[0]

    lines = textwrap.wrap(
        _QUOTED.sub(kept_together, text),
        max(columns, len(start) + _MIN_COLUMNS),
        initial_indent=start,
        subsequent_indent=space,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines or [start.rstrip()]).replace(_UNBROKEN, " ")
