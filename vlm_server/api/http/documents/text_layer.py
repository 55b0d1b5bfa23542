"""The text layer of a PDF's page, in the order of reading."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from ctypes import c_double
from statistics import median_low
from typing import NamedTuple

import pypdfium2
from pypdfium2 import raw

from vlm_server.api.http.documents.reading_order import Word, ordered_text

_JUMP = 0.6
"""Distance between two glyphs, in their heights, from which they are of two words."""
_SKEW = math.radians(10)
"""Angle from which a text is neither upright nor turned by right angles."""
_HYPHENS = (0x02, 0xFFFE)
"""What PDFium gives for a hyphen at the end of a line, within a word."""
_HYPHEN = "\x02"
_FIRST_IDEOGRAPH = "\u2e80"
_SKEWED = -1


class _Glyph(NamedTuple):
    """A character, its box, and the y of its base line.

    x is from the left, and y from the top, as if its text were upright. `turn`: the right angles by
    which it is turned clockwise, or `_SKEWED`.
    """

    text: str
    left: float
    top: float
    right: float
    bottom: float
    base: float
    turn: int

    def is_followed_by(self, other: _Glyph) -> bool:
        """Whether `other` may be the next glyph of the same word."""
        if self.turn != other.turn or self.turn == _SKEWED:
            return self.turn == other.turn
        most = _JUMP * max(self.bottom - self.top, other.bottom - other.top)
        across = max(other.left - self.right, self.left - other.right)  # either way
        return across < most and abs(other.top + other.bottom - self.top - self.bottom) < 2 * most


def page_text(page: pypdfium2.PdfPage, text_page: pypdfium2.PdfTextPage) -> str:
    """The text within the page; upright and turned texts are ordered by themselves.

    Skewed texts, and pages written from top to bottom, keep the order of the file. Raises
    PdfiumError.
    """
    words, num_alone, num_glyphs = defaultdict[int, list[Word]](list), 0, 0
    for glyphs in _words(text_page, page.get_bbox()):
        words[glyphs[0].turn].append(_word(glyphs, num_glyphs))
        num_glyphs += len(glyphs)
        num_alone += len(glyphs) == 1 and glyphs[0].text >= _FIRST_IDEOGRAPH
    if 2 * num_alone > num_glyphs:
        text: str = text_page.get_text_bounded()
        lines = text.replace("\r\n", "\n").replace("\ufffe", _HYPHEN).replace("\0", "")
        return _join_hyphens(lines)
    skewed = " ".join(word.text for word in words.pop(_SKEWED, []))
    texts = [ordered_text(each) for each in sorted(words.values(), key=len, reverse=True)]
    joined = "\n".join(filter(None, [*texts, skewed]))
    return _join_hyphens(joined)


def _join_hyphens(text: str) -> str:
    return text.replace(_HYPHEN + "\n", "").replace(_HYPHEN, "-")


def _words(
    text_page: pypdfium2.PdfTextPage, bounds: tuple[float, float, float, float]
) -> Iterator[list[_Glyph]]:
    """The glyphs of each word within `bounds`: left, bottom, right and top."""
    word = list[_Glyph]()
    for index in range(text_page.count_chars()):
        glyph = _glyph(text_page, index, bounds)
        if word and (glyph is None or not word[-1].is_followed_by(glyph)):
            yield word
            word = []
        if glyph is not None:
            word.append(glyph)
    if word:
        yield word


def _glyph(
    text_page: pypdfium2.PdfTextPage, index: int, bounds: tuple[float, float, float, float]
) -> _Glyph | None:
    """The glyph at `index`; None for spaces, and for what is outside of the page."""
    code = raw.FPDFText_GetUnicode(text_page, index)
    char = _HYPHEN if code in _HYPHENS else chr(code)
    if char.isspace() or not code:
        return None
    left, bottom, right, top = text_page.get_charbox(index, loose=True)
    if not (
        bounds[0] <= (left + right) / 2 <= bounds[2]
        and bounds[1] <= (bottom + top) / 2 <= bounds[3]
    ):
        return None
    angle = raw.FPDFText_GetCharAngle(text_page, index)
    if raw.FPDFText_GetFontSize(text_page, index) < 0:
        angle += math.pi  # PDFium's angle leaves out the sign of the size
    turn = _turn(angle)
    x, y = c_double(), c_double()
    raw.FPDFText_GetCharOrigin(text_page, index, x, y)
    boxes = {
        1: (-top, -right, -bottom, -left, -x.value),
        2: (-right, bottom, -left, top, y.value),
        3: (bottom, left, top, right, x.value),
    }
    return _Glyph(char, *boxes.get(turn, (left, -top, right, -bottom, -y.value)), turn)


def _turn(angle: float) -> int:
    turns = round(angle / (math.pi / 2))
    return turns % 4 if abs(angle - turns * math.pi / 2) < _SKEW else _SKEWED


def _word(glyphs: list[_Glyph], index: int) -> Word:
    return Word(
        "".join(glyph.text for glyph in glyphs),
        index,
        min(glyph.left for glyph in glyphs),
        max(glyph.right for glyph in glyphs),
        median_low(glyph.base for glyph in glyphs),
        max(glyph.bottom - glyph.top for glyph in glyphs),
    )
