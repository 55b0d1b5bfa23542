"""What a terminal can show."""

from __future__ import annotations

import os
from typing import TextIO

CLEAR_LINE = "\r\x1b[K"
"""Removes a line of progress."""
BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"
"""Styles, as parameters of the escape sequence SGR."""


def has_styles(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that shows styles, and its user wants them (NO_COLOR)."""
    can_style = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
    return can_style and not os.environ.get("NO_COLOR")


def styled(text: str, style: str, stream: TextIO) -> str:
    """`text` in `style`, if `stream` has styles."""
    return f"\x1b[{style}m{text}\x1b[0m" if text and has_styles(stream) else text
