"""Whose turn it is among those who want the same thing. Knows how much is left; no requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """One that waits for its next turn, and how much it still wants, in units of its kind.

    `num_rows` is what it takes of the room when it has all that it wants.
    """

    request_id: str
    left: int
    is_begun: bool
    num_rows: int = 0


class FairQueue:
    """The oldest comes first; the shortest of the others gets every other turn beside it.

    Two are begun at most, and more only if one of them could not go on for a while. So what is
    short waits for no long one's end; what is long takes twice as long at most; and everyone is
    the oldest one day, whoever else comes. What is begun has its rows for certain: nobody begins
    before there is room, and nobody takes from the room that the oldest waits for.
    """

    def __init__(self) -> None:
        self._last: str | None = None

    def next(self, waiting: Sequence[Waiting], room: int = 0) -> str | None:
        """Whose turn it is among `waiting`, the oldest first; None if nobody can have one.

        `room` counts the rows that are free, those of what is begun among them.
        """
        begun = [one for one in waiting if one.is_begun]
        room -= sum(one.num_rows for one in begun)
        oldest = waiting[0] if waiting else None
        if oldest is None or (not oldest.is_begun and oldest.num_rows > room):
            return begun[0].request_id if begun else None
        if oldest.request_id != self._last:
            return oldest.request_id
        room -= 0 if oldest.is_begun else oldest.num_rows
        others = [one for one in begun if one is not oldest] or [
            one for one in waiting if one.left < oldest.left and one.num_rows <= room
        ]
        return min(others, key=lambda one: one.left, default=oldest).request_id

    def took(self, request_id: str) -> None:
        """A turn was taken; until then `next` says the same."""
        self._last = request_id
