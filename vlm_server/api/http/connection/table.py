"""State shared by open connections: the table of all, and the queue of parsing."""

from __future__ import annotations

import asyncio
import enum
import heapq
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlm_server.api.http.connection.protocol import HttpConnection


class ConnectionStage(enum.IntEnum):
    """The stage of a connection, in the order in which connections are closed for a new one."""

    CLOSING = 0
    """The last answer is complete: its rest is being sent, further requests are ignored."""
    SILENT = 1
    """Nothing has arrived yet."""
    IDLE = 2
    """All requests are answered, and no other has begun."""
    HEAD = 3
    """The head of a request is arriving."""
    BODY = 4
    """The body of a request is arriving."""
    ANSWER = 5
    """A whole request is being answered: never closed for another."""


class ConnectionTable:
    """All open connections, at most `limit()`, which may change.

    A new connection replaces one of the first stage, of these the one longest in it.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._open: set[HttpConnection] = set()
        self.takes_requests = True
        """Whether requests are still accepted; False while the server stops."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: HttpConnection) -> bool:
        """Add `connection`, perhaps in place of another. Returns whether it was added."""
        if not self.make_room(1):
            return False
        self._open.add(connection)
        return True

    def make_room(self, num: int = 0) -> bool:
        """Close connections until `num` more fit; returns whether they fit."""
        excess = len(self._open) + num - self._limit()
        for victim in heapq.nsmallest(excess, self._open, key=_worth):
            if victim.stage is ConnectionStage.ANSWER:
                return False
            self._open.discard(victim)
            victim.evict()
        return True

    def discard(self, connection: HttpConnection) -> None:
        """Remove a closed connection."""
        self._open.discard(connection)


class ParseQueue:
    """Parsing in turns: one slice per turn of the event loop, however many connections wait."""

    def __init__(self) -> None:
        self._waiting: deque[HttpConnection] = deque()

    def add(self, connection: HttpConnection) -> None:
        """Enqueue `connection` to parse its next slice."""
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        connection = self._waiting[0]
        try:
            connection.parse_slice()
        finally:
            self._waiting.popleft()
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._turn)


def _worth(connection: HttpConnection) -> tuple[ConnectionStage, float]:
    return connection.stage, connection.since
