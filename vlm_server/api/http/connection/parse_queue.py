"""Lets connections parse in turn, so that none keeps the event loop from the others."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol


class Parsing(Protocol):
    """A connection with bytes that have arrived and are not parsed yet."""

    def parse_slice(self) -> None: ...


class ParseQueue:
    """One slice per turn of the event loop, however many connections wait."""

    def __init__(self) -> None:
        self._waiting: deque[Parsing] = deque()

    def add(self, connection: Parsing) -> None:
        """Let `connection` parse its next slice after those that wait already."""
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
