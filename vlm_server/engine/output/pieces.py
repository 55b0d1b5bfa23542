"""Pieces of an answer's text, and the marks between them, such as `<tool_call>`."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from vlm_server.protocol import ToolCallDelta

BLANKS = " \t\r\n"


class ReasoningPiece(NamedTuple):
    text: str


Piece = str | ReasoningPiece | ToolCallDelta
"""A piece of an answer's content, its reasoning or a tool call."""


def add_piece(pieces: list[Piece], piece: Piece) -> None:
    """Append `piece`; text is joined to preceding text of the same kind."""
    last_piece = pieces[-1] if pieces else None
    if isinstance(piece, str) and isinstance(last_piece, str):
        pieces[-1] = last_piece + piece
    elif isinstance(piece, ReasoningPiece) and isinstance(last_piece, ReasoningPiece):
        pieces[-1] = ReasoningPiece(last_piece.text + piece.text)
    else:
        pieces.append(piece)


class Marks:
    """A search for several marks: finds the leftmost, and the longest at one position.

    The result does not depend on how the text was split.
    """

    def __init__(self, *marks: str) -> None:
        longest_first = sorted(filter(None, marks), key=len, reverse=True)
        whole = "|".join(map(re.escape, longest_first)) or "(?!)"
        begun = "|".join(filter(None, map(_partial_pattern, longest_first))) or "(?!)"
        self._whole = re.compile(whole)
        self._whole_or_begun = re.compile(f"{begun}|(?P<whole>{whole})")

    def find(self, text: str, *, is_last: bool = False) -> tuple[int, str]:
        """(length of the text before the mark, the mark).

        Without a mark: (length of the text that can't become part of one, ""). If `is_last`, no
        text follows.
        """
        match = (self._whole if is_last else self._whole_or_begun).search(text)
        if match is None:
            return len(text), ""
        return match.start(), match[0] if is_last else match["whole"] or ""


def _partial_pattern(mark: str) -> str:
    """A pattern for the beginning of `mark`, but not all of it, at the end of a text."""
    pattern = ""
    for character in reversed(mark[:-1]):
        pattern = re.escape(character) + (rf"(?:\Z|{pattern})" if pattern else r"\Z")
    return pattern


@lru_cache(maxsize=64)
def marks(*texts: str) -> Marks:
    """Cached `Marks`: a model has few, and its requests share them."""
    return Marks(*texts)
