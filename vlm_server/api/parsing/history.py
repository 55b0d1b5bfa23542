"""Earlier turns of a conversation that the front keeps, for dialects whose clients name them."""

from __future__ import annotations

from typing import Protocol


class HistoryNeeded(Exception):
    """A request can't be read without earlier turns. Not an error of the client.

    It goes on from `response_id`, if there is one, and refers to items of `others`.
    """

    def __init__(self, response_id: str | None, others: tuple[str, ...] = ()) -> None:
        super().__init__("earlier turns")
        self.response_id = response_id
        self.others = others


class History(Protocol):
    """Where earlier turns are kept."""

    def recall(self, owner: str, response_id: str) -> tuple[bytes, ...]:
        """The turns up to that response, the oldest first, as their dialect wrote them.

        Raises RequestError if `owner` has no such response.
        """
        ...

    def turn(self, owner: str, response_id: str) -> tuple[bytes, ...]:
        """The turn of that response alone; empty if `owner` has no such response."""
        ...
