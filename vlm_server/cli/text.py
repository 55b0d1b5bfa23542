"""Text for terminals: messages, tables, questions, hints, no control characters."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterable, Sequence

from vlm_server.platform.terminal import columns_of, hanging, styled

_MIN_CELL, _UNBOUNDED = 16, 1 << 20
_SMALL_INDENT, _MAX_INDENT = 2, 12
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}, "\ufffd")


def printable(text: str) -> str:
    """`text` without control characters, which could control a terminal."""
    return text.translate(_CONTROLS)


def say(text: str, start: str = "", style: str = "") -> None:
    """Print a message on stderr after its `start`: on a terminal wrapped, and in `style`.

    A line that begins with a space is a command to copy, and stays as it is.
    """
    columns, indent = columns_of(sys.stderr), min(len(start), _MAX_INDENT) or _SMALL_INDENT
    first, *others = printable(text).split("\n")
    lines = [hanging(start, first, columns, indent)]
    lines += [hanging("", x, None if x.startswith(" ") else columns, indent) for x in others]
    print(styled("\n".join(lines), style, sys.stderr), file=sys.stderr)


def table(rows: Sequence[Sequence[str]], columns: int | None = None) -> str:
    """The lines of `rows`, the first of which is the head, in columns as wide as their cells.

    In more than `columns`, the last cell is cut at its start: of a path, the end tells most.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = max(_MIN_CELL, (columns or _UNBOUNDED) - sum(widths[:-1]) - 2 * (len(widths) - 1))
    cut = [
        [*row[:-1], row[-1] if len(row[-1]) <= room else f"…{row[-1][1 - room :]}"] for row in rows
    ]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cut)


def facts(rows: Iterable[tuple[str, str]], columns: int | None = None) -> str:
    """Names and texts in two columns; a text in more than `columns` goes on below itself."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(hanging(f"{name:<{width}}", text, columns) for name, text in rows)


def from_home(path: str) -> str:
    """`path` with `~` for the user's folder."""
    home = os.path.expanduser("~")
    return f"~{path[len(home) :]}" if path.startswith(f"{home}/") else path


def shorten_stage(stage: str, columns: int) -> str:
    """`stage` in at most `columns`: in `downloading FILE: 1 of 2 GB`, the file's name is cut."""
    name, colon, figures = stage.rpartition(": ")
    room = columns - len(colon) - len(figures) - 1
    if len(stage) <= columns or not colon or room < 1:
        return stage
    return f"{name[:room]}\u2026{colon}{figures}"


def program() -> str:
    """Name by which a shell finds the program."""
    return "vlm-server" if shutil.which("vlm-server") else f"{sys.prefix}/bin/vlm-server"


def toy_hint() -> str:
    """What to say to a person whom the embedded model answers."""
    real = f"{program()} serve --model mlx-community/Qwen3-VL-2B-Instruct-4bit"
    return f"demo is a toy that knows simple drawings. A real model:\n  {real}"


def is_confirmed(question: str, refusal: str, *, is_given: bool = False) -> bool:
    """Whether the user types `y`, unless it `is_given` already; `refusal` is printed if not."""
    answer = "yes" if is_given else ""
    with contextlib.suppress(EOFError):
        answer = answer or input(f"{question} [y/N] ").strip().lower()
    if answer not in ("y", "yes"):
        print(refusal)
        return False
    return True
