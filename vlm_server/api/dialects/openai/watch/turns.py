"""The turns in which watches ask the device: few at a time, fairly by key, after other requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_LOOK_SECONDS = 0.02


class Turns:
    """At most `limit` questions at a time. The next one is of the key that had a turn longest ago.

    With others waiting for the device (`others_wait`), a turn begins up to `yield_seconds` later.
    """

    def __init__(self, limit: int, yield_seconds: float, others_wait: Callable[[], bool]) -> None:
        self._limit = limit
        self._yield_seconds = yield_seconds
        self._others_wait = others_wait
        self._running = Counter[str]()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._last_turns: dict[str, int] = {}
        self._num_turns = 0

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """The `with` block is one question of a watch of `owner`."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((owner, turn))
        self._begin_next()
        try:
            await turn
            await self._yield_to_others()
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._running[owner] -= 1
            self._waiting = [entry for entry in self._waiting if entry[1] is not turn]
            self._begin_next()

    def forget(self, owner: str) -> None:
        """Forget a key without watches."""
        self._last_turns.pop(owner, None)
        if not self._running[owner]:
            del self._running[owner]

    def _begin_next(self) -> None:
        while self._waiting and self._running.total() < self._limit:
            owner, turn = min(self._waiting, key=self._place)
            self._waiting.remove((owner, turn))
            self._num_turns += 1
            self._last_turns[owner] = self._num_turns
            self._running[owner] += 1
            turn.set_result(None)

    def _place(self, entry: tuple[str, asyncio.Future[None]]) -> tuple[int, int]:
        return self._running[entry[0]], self._last_turns.get(entry[0], 0)

    async def _yield_to_others(self) -> None:
        clock = asyncio.get_running_loop().time
        latest = clock() + self._yield_seconds
        while self._others_wait() and clock() < latest:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)
