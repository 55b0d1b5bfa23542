"""The turns in which watches ask the device: few at a time, fairly by key, after other requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from vlm_server.api.fair_turns import FairTurns

_LOOK_SECONDS = 0.02


class Turns(FairTurns):
    """At most `limit` questions at a time.

    With others waiting for the device (`others_wait`), a turn begins up to `yield_seconds` later.
    """

    def __init__(self, limit: int, yield_seconds: float, others_wait: Callable[[], bool]) -> None:
        super().__init__(limit)
        self._yield_seconds = yield_seconds
        self._others_wait = others_wait

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """The `with` block is one question of a watch of `owner`."""
        async with super().turn(owner):
            await self._yield_to_others()
            yield

    async def _yield_to_others(self) -> None:
        clock = asyncio.get_running_loop().time
        latest = clock() + self._yield_seconds
        while self._others_wait() and clock() < latest:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_SECONDS)
