"""Earlier turns of a conversation that the front keeps, for dialects whose clients name them."""

from __future__ import annotations

from typing import Protocol


class HistoryNeeded(Exception):
    """A request can't be read without the turns up to `response_id`. Not an error of the client."""

    def __init__(self, response_id: str) -> None:
        super().__init__("earlier turns")
        self.response_id = response_id


class History(Protocol):
    """Where earlier turns are kept."""

    def recall(self, owner: str, response_id: str) -> tuple[bytes, ...]:
        """The turns up to that response, the oldest first, as their dialect wrote them.

        Raises RequestError if `owner` has no such response.
        """
        ...
