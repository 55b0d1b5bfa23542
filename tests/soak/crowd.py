"""A varying number of users who send requests at the same time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from tests.soak.mix import Gallery, User
from tests.soak.request import Ending, Outcome, Request

Send = Callable[[Request], Awaitable[Outcome]]

_FAILURE_PAUSE_SECONDS = 0.5


class Crowd:
    """1 to `most` users; their number is sampled from `seed` every few seconds.

    stage_seconds: the shortest and the longest time with one number of users. poll_seconds: how
    often a user who is not active looks whether to begin.
    """

    def __init__(
        self,
        send: Send,
        seed: int,
        most: int,
        stage_seconds: tuple[float, float] = (3.0, 8.0),
        poll_seconds: float = 0.05,
    ) -> None:
        gallery = Gallery(seed)
        self._send = send
        self._stage_seconds = stage_seconds
        self._poll_seconds = poll_seconds
        self._users = [User(gallery, seed, number) for number in range(most)]
        self._rng = random.Random(f"{seed}/crowd")
        self.size = 0
        self.outcomes: list[Outcome] = []

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Let users ask until `is_over()`; all requests have ended when this returns."""
        varying = asyncio.create_task(self._vary_size())
        try:
            await asyncio.gather(*(self._ask_on(user, is_over) for user in self._users))
        finally:
            varying.cancel()
            self.size = 0

    async def ask_in_turn(self, requests: Sequence[Request]) -> None:
        """Send `requests` one after another, outside of the crowd."""
        for request in requests:
            self.outcomes.append(await self._send(request))

    async def _vary_size(self) -> None:
        while True:
            self.size = self._rng.randint(1, len(self._users))
            await asyncio.sleep(self._rng.uniform(*self._stage_seconds))

    async def _ask_on(self, user: User, is_over: Callable[[], bool]) -> None:
        while not is_over():
            if user.number >= self.size:
                await asyncio.sleep(self._poll_seconds)
                continue
            request = user.next()
            outcome = await self._send(request)
            self.outcomes.append(outcome)
            if outcome.ending is Ending.ANSWERED:
                user.hear(request, outcome.text)
            elif outcome.ending is Ending.FAILED:
                await asyncio.sleep(_FAILURE_PAUSE_SECONDS)
