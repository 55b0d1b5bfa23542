"""Text for terminals: tables, sizes, no control characters."""

from __future__ import annotations

from collections.abc import Sequence

_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}, "\ufffd")


def printable(text: str) -> str:
    """`text` without control characters, which could control a terminal."""
    return text.translate(_CONTROLS)


def table(rows: Sequence[Sequence[str]]) -> str:
    """The lines of `rows`, the first of which is the head, in columns as wide as their cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def shorten_stage(stage: str, columns: int) -> str:
    """`stage` in at most `columns`: in `downloading FILE: 1 of 2 GB`, the file's name is cut."""
    name, colon, figures = stage.rpartition(": ")
    room = columns - len(colon) - len(figures) - 1
    if len(stage) <= columns or not colon or room < 1:
        return stage
    return f"{name[:room]}\u2026{colon}{figures}"


def binary_size(num_bytes: float) -> str:
    """A size in binary units, for people."""
    for unit in ("bytes", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB" if num_bytes < 1024 else f"{num_bytes / 1024:.1f} TiB"
