"""Text for terminals: tables, sizes, the nearest of several names, no control characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}, "\ufffd")


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """`: did you mean NAME?` with the name most like `word`; empty if none is like it."""
    import difflib  # only when something is wrong

    by_folded = {name.casefold(): name for name in names}
    by_folded |= {name.rpartition("/")[2]: by_folded[name] for name in list(by_folded)}
    close = difflib.get_close_matches(word.casefold(), by_folded, n=1)
    return f": did you mean {by_folded[close[0]]}?" if close else ""


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
