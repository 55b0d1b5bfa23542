"""The words of a page in the order in which a person reads them.

Columns of prose are read one after the other; the cells of a table's row are one line, separated by
tabs. Knows boxes and texts; knows nothing of PDFs. The time is bounded: at most `_MAX_DEPTH` times,
words are sorted.
"""

from __future__ import annotations

import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from operator import attrgetter
from statistics import median
from typing import NamedTuple

_MAX_DEPTH = 12
"""Cuts within cuts; what is cut more often is read line by line."""
_GAP = 0.8
"""Least gap between columns or cells, in heights of words: no space within a line is as wide."""
_MIN_LINES, _ASKEW_LINES = 2, 4
"""Least lines of a column, and of one that is none but for the heights of its lines."""
_SAME_LINE = 0.6
"""Most distance of the base lines of words of one line, in heights of the smaller."""
_LONG_LINE, _SHORT_LINE = 10.0, 5.0
"""Widths of a line of prose, and the least one of a line in a column, in heights of words."""
_FULL_LINE = 0.8
"""Least part of the longest line that most of prose has; cells of tables differ more."""
_LETTERS = 0.7
"""Least part of prose that is letters; less, and it is figures, a dump, a list of prices."""
_ALIGNED = 0.1
"""Most distance of two cells of a table from one line, in heights of words."""


class Word(NamedTuple):
    """A word, in points: x from the left, and its base line's y, from the top.

    `place`: its number in the file. `height`: of the line that it takes.
    """

    text: str
    place: int
    left: float
    right: float
    y: float
    height: float


_Row = list[Word]
"""Words side by side, ordered by their left ends; none is above or below in whole."""


def ordered_text(words: Sequence[Word]) -> str:
    """The lines of `words`, which run from left to right, or right to left in such scripts."""
    if not words:
        return ""
    gap = _GAP * median(word.height for word in words)
    return "\n".join(_lines(_rows(words), gap, 0))


def _lines(rows: Sequence[_Row], gap: float, depth: int) -> Iterator[str]:
    """The lines of a region, in order. `gap` is the least width of a gutter."""
    gutter = _gutter(rows, gap) if len(rows) >= _MIN_LINES and depth < _MAX_DEPTH else None
    if gutter is None:
        for row in rows:
            yield from _texts(row, gap)
        return
    for is_crossed, group in groupby(rows, lambda row: _crosses(row, *gutter)):
        part = list(group)
        if is_crossed:
            yield from _lines(part, gap, depth + 1)
            continue
        columns = _columns(part, gutter, gap)
        for column in columns:
            yield from _lines(column, gap, depth + 1)
        if not columns:
            for row in part:
                yield from _texts(row, gap)


def _columns(rows: Sequence[_Row], gutter: tuple[float, float], gap: float) -> list[list[_Row]]:
    """The rows to the left and to the right of `gutter`; none if they are those of a table.

    In columns, lines are long, full and of letters, or at different heights, or written one column
    after the other.
    """
    words = [word for row in rows for word in row]
    left = [word for word in words if word.right <= gutter[0]]
    right = [word for word in words if word.right > gutter[0]]
    columns = [_rows(left), _rows(right)]
    shortest = min(map(len, columns))
    if shortest < _MIN_LINES:
        return []
    height = gap / _GAP
    widths, fills = zip(*(_line_width(column, gap) for column in columns), strict=True)
    if min(widths) < _SHORT_LINE * height or not _are_beside(columns, height):
        return []
    are_full = min(widths) >= _LONG_LINE * height and min(fills) >= _FULL_LINE
    are_full = are_full and _have_letters(left) and _have_letters(right)
    are_apart = max(word.place for word in left) < min(word.place for word in right)
    are_askew = shortest >= _ASKEW_LINES and not _are_beside(columns, _ALIGNED * height)
    return columns if are_full or are_apart or are_askew else []


def _have_letters(words: Sequence[Word]) -> bool:
    text = "".join(word.text for word in words)
    return sum(map(str.isalpha, text)) >= _LETTERS * len(text)


def _line_width(rows: Sequence[_Row], gap: float) -> tuple[float, float]:
    """The width such that half of the text is in lines as long, and its part of the longest."""
    widths = sorted(end - start for row in rows for start, end in _pieces(row, gap))
    half = sum(widths) / 2
    middle = next(
        (width for width, total in zip(widths, accumulate(widths), strict=True) if total >= half),
        0.0,
    )
    return middle, middle / widths[-1] if widths[-1] else 0.0


def _are_beside(columns: Sequence[Sequence[_Row]], most: float) -> bool:
    """Whether most rows of the shorter column are at most so much higher or lower than another."""
    shorter, longer = sorted((sorted(row[0].y for row in column) for column in columns), key=len)
    num_beside = 0
    for y in shorter:
        at = bisect_left(longer, y)
        num_beside += any(abs(y - other) <= most for other in longer[max(0, at - 1) : at + 1])
    return 2 * num_beside > len(shorter)


def _rows(words: Sequence[Word]) -> list[_Row]:
    """From top to bottom. The lower halves of two rows' words do not overlap vertically."""
    rows, bottom = list[_Row](), 0.0
    for word in sorted(words, key=lambda word: word.y - word.height / 2):
        if not rows or word.y - word.height / 2 >= bottom:
            rows.append([])
            bottom = word.y
        rows[-1].append(word)
        bottom = max(bottom, word.y)
    for row in rows:
        row.sort(key=attrgetter("left"))
    return rows


def _pieces(row: _Row, gap: float) -> list[tuple[float, float]]:
    """The left and right ends of a row's words, joined where less than `gap` is between them."""
    pieces = list[tuple[float, float]]()
    for word in row:
        if pieces and word.left - pieces[-1][1] < gap:
            pieces[-1] = pieces[-1][0], max(pieces[-1][1], word.right)
        else:
            pieces.append((word.left, word.right))
    return pieces


def _gutter(rows: Sequence[_Row], gap: float) -> tuple[float, float] | None:
    """The ends of the gutter that most rows stand beside, left and right of it; None without one.

    Rows of two columns may be at different heights, so that each has words on one side alone: what
    counts is the lower one of the numbers of rows to the left, and to the right.
    """
    left = min(row[0].left for row in rows) - gap
    right = max(max(word.right for word in row) for row in rows) + gap
    changes = list[tuple[float, int, int]]()  # where the numbers of rows left and right change
    for row in rows:
        pieces = _pieces(row, gap)
        ends = [left, *(end for _, end in pieces)]
        starts = [*(start for start, _ in pieces), right]
        for number, (start, end) in enumerate(zip(ends, starts, strict=True)):
            sides = int(number > 0), int(number < len(pieces))
            changes += [(start, *sides), (end, -sides[0], -sides[1])]
    changes.sort()
    best, found, lefts, rights = (_MIN_LINES - 1, len(rows) * 2), None, 0, 0
    for number, (start, more_left, more_right) in enumerate(changes[:-1]):
        lefts, rights = lefts + more_left, rights + more_right
        end, score = changes[number + 1][0], (min(lefts, rights), lefts + rights)
        if end > start and score > best:
            best, found = score, (start, end)
    return found


def _crosses(row: _Row, start: float, end: float) -> bool:
    return any(word.left < end and word.right > start for word in row)


def _texts(row: _Row, gap: float) -> Iterator[str]:
    """The lines of a row: more than one where a large letter stands beside several."""
    line = list[Word]()
    for word in sorted(row, key=attrgetter("y")):
        if line and word.y - line[0].y > _SAME_LINE * min(word.height, line[0].height):
            yield _text(line, gap)
            line = []
        line.append(word)
    yield _text(line, gap)


def _text(line: list[Word], gap: float) -> str:
    is_leftward = sum(map(_direction, line)) < 0
    line.sort(key=attrgetter("left"), reverse=is_leftward)
    text, previous = "", line[0]
    for word in line:
        between = max(word.left - previous.right, previous.left - word.right)
        text += ("\t" if between >= gap else " ") + word.text
        previous = word
    return text[1:]


def _direction(word: Word) -> int:
    """1 for a word of letters that run to the right, -1 to the left, 0 without letters."""
    kinds = [unicodedata.bidirectional(char) for char in word.text]
    return int("L" in kinds) - int("R" in kinds or "AL" in kinds)
