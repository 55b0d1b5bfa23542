"""What one check found, and what to do about it."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """`text` is one line; so is `advice`, which is empty only if all is well.

    A `problem` keeps the daemon from working as the settings say; a `warning` does not.
    """

    check: str
    level: Level
    text: str
    advice: str = ""


def ok(check: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(check, "ok", text)


def warning(check: str, text: str, advice: str) -> Finding:
    """It works, but not as well or as safely as it could."""
    return Finding(check, "warning", text, advice)


def problem(check: str, text: str, advice: str) -> Finding:
    """It does not work."""
    return Finding(check, "problem", text, advice)


def size_text(num_bytes: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB" if num_bytes < 1024 else f"{num_bytes / 1024:.1f} TiB"
