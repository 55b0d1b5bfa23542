"""What fits the width of a terminal: the least important columns are shortened or left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

_GAP = 2
"""Spaces between two columns."""


class Column(NamedTuple):
    """A column of a table.

    Of columns that do not fit, those of the highest `rank` are left out, but none of rank 0. Before
    that, cells are cut to `shortest` characters; 0: they are not cut.
    """

    head: str
    rank: int = 0
    shortest: int = 0
    is_right: bool = False


def fitting(widths: Sequence[int], ranks: Sequence[int], room: int, gap: int = 0) -> list[int]:
    """The places of the parts that fit into `room` columns with gaps between them."""
    places = list(range(len(widths)))
    while sum(widths[place] + gap for place in places) - gap > room:
        least_important = max(places, key=lambda place: ranks[place])
        if not ranks[least_important]:
            break
        places.remove(least_important)
    return places


def fitted_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], room: int
) -> Table:
    """A table without lines, `room` wide at most; a row may end before the last column."""
    texts = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    needed = [
        max(len(column.head), *(row[place].cell_len for row in texts if place < len(row)), 0)
        for place, column in enumerate(columns)
    ]
    widths = [
        min(width, column.shortest or width) for width, column in zip(needed, columns, strict=True)
    ]
    places = fitting(widths, [column.rank for column in columns], room, _GAP)
    for _ in range(room - sum(widths[place] + _GAP for place in places) + _GAP):
        most_cut = max(places, key=lambda place: needed[place] - widths[place])
        widths[most_cut] = min(widths[most_cut] + 1, needed[most_cut])
    table = Table(box=None, pad_edge=False)
    for place in places:
        table.add_column(
            Text(columns[place].head, "bold"),
            justify="right" if columns[place].is_right else "left",
            width=widths[place],
            no_wrap=True,
            overflow="ellipsis",
        )
    for row in texts:
        table.add_row(*(row[place] for place in places if place < len(row)))
    return table
