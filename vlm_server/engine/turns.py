"""Whose turn it is among those who want the same thing. Knows how much is left; no requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """One that waits for its next turn, and how much it still wants, in units of its kind."""

    request_id: str
    left: int
    is_begun: bool


class Turns:
    """The oldest comes first; the shortest of the others gets every other turn beside it.

    Two are begun at most. So what is short waits for no long one's end; what is long takes
    twice as long at most; and everyone is the oldest one day, whoever else comes.
    """

    def __init__(self) -> None:
        self._last: str | None = None

    def next(self, waiting: Sequence[Waiting], *, has_room_for_two: bool = True) -> str | None:
        """Takes a turn for one of `waiting`, the oldest first; None if nobody waits."""
        begun = [one for one in waiting if one.is_begun]
        first = next(iter(begun or waiting), None)
        if first is None:
            return None
        chosen = first
        if has_room_for_two and first.request_id == self._last:
            others = begun[1:] or [one for one in waiting if one.left < first.left]
            chosen = min(others, key=lambda one: one.left, default=first)
        self._last = chosen.request_id
        return chosen.request_id
