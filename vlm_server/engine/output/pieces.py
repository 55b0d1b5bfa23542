"""What the text of an answer is split into."""

from __future__ import annotations

from typing import NamedTuple

from vlm_server.protocol import ToolCallDelta

BLANKS = " \t\r\n"


class Thought(NamedTuple):
    """Text of a thought."""

    text: str


Piece = str | Thought | ToolCallDelta
"""More of an answer: of its content, of a thought, or of a tool call."""


def add_piece(pieces: list[Piece], piece: Piece) -> None:
    """Append `piece`; text is joined to text of its kind that it follows."""
    last = pieces[-1] if pieces else None
    if isinstance(piece, str) and isinstance(last, str):
        pieces[-1] = last + piece
    elif isinstance(piece, Thought) and isinstance(last, Thought):
        pieces[-1] = Thought(last.text + piece.text)
    else:
        pieces.append(piece)
