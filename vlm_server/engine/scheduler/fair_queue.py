"""Whose turn it is among requests that want the same resource: the encoder, or the prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for its next turn.

    left: how much work it has left, in tokens. num_seqs: how many sequences it adds to the decode
    batch when none is left.
    """

    request_id: str
    left: int
    is_begun: bool
    num_seqs: int = 0


class FairQueue:
    """The oldest comes first; the shortest of the others gets every other turn beside it.

    At most two are begun at a time, and more only if one of them can't go on for a while. So a
    short one never waits for the end of a long one; a long one takes twice as long at most; and
    every request becomes the oldest eventually. A request begins only if the decode batch has room
    for all its sequences, and none takes the room that the oldest waits for.
    """

    def __init__(self) -> None:
        self._last: str | None = None

    def next(self, waiting: Sequence[Waiting], room: int = 0) -> str | None:
        """Whose turn it is among `waiting`, the oldest first; None if no request can have one.

        `room`: how many sequences the decode batch can still take, with those of begun requests.
        """
        begun = [one for one in waiting if one.is_begun]
        room -= sum(one.num_seqs for one in begun)
        oldest = waiting[0] if waiting else None
        if oldest is None or (not oldest.is_begun and oldest.num_seqs > room):
            return begun[0].request_id if begun else None
        if oldest.request_id != self._last:
            return oldest.request_id
        room -= 0 if oldest.is_begun else oldest.num_seqs
        others = [one for one in begun if one is not oldest] or [
            one for one in waiting if one.left < oldest.left and one.num_seqs <= room
        ]
        return min(others, key=lambda one: one.left, default=oldest).request_id

    def copy(self) -> FairQueue:
        """One that goes on from here, to see whose turns come."""
        copied = FairQueue()
        copied._last = self._last
        return copied

    def took(self, request_id: str) -> None:
        """A turn was taken; until then `next` gives the same answer."""
        self._last = request_id
