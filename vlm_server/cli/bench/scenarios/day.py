"""A day of mixed requests, compressed: does the server stay as fast as it was in the morning?

The day consists of rounds. Each has the same work with new pictures and words, in an order drawn
from the seed: an agent, a burst of several users, a user with questions, texts. Then nobody asks
for a while. Whole rounds are compared, so that all have requests of the same kinds and sizes.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable

import msgspec
from PIL import Image

from vlm_server.cli.bench.client import Client
from vlm_server.cli.bench.scenarios.material import (
    DESCRIBE,
    QUESTIONS,
    Material,
    Message,
    assistant,
    user,
)

NAME = "day"
FIXED_WORK = "fixed work"
"""Work of this process that no server has a part in: the machine's own speed."""
_FIXED_WORKS = 3
_AGENT_TURNS = 6
_BURST_USERS = 4
_QUESTIONS = 4
_STORIES = 2
_THINK_SECONDS = (0.02, 0.2)
"""Between an answer and what the same user asks next."""
_IDLE_SECONDS = (1.5, 4.0)
"""What is left of hours in which nobody asks."""


class Sample(msgspec.Struct, frozen=True):
    """One request of a day. `seconds` is when it was sent, since the day began; `round` counts
    from 0. Requests of one `kind` have the same size. `ttft` is None if it failed.

    `FIXED_WORK` is no request: its `ttft` is how long the work took.
    """

    kind: str
    round: int
    seconds: float
    ttft: float | None


async def spend_day(client: Client, material: Material, seconds: float) -> list[Sample]:
    """Ask until so much time is over; a round that has begun is completed.

    The samples are in the order in which the answers ended.
    """
    day = Day(client, material)
    while day.elapsed_seconds < seconds:
        await day.spend_round()
    return day.samples


class Day:
    """Asks one server, round after round; `samples` are of the rounds until now."""

    def __init__(self, client: Client, material: Material) -> None:
        self._client = client
        self._material = material
        self._round = 0
        self._picture = Image.new("RGB", (2000, 1500))
        self._start = time.perf_counter()
        self.samples: list[Sample] = []

    @property
    def elapsed_seconds(self) -> float:
        return time.perf_counter() - self._start

    async def spend_round(self) -> None:
        """All the work once, then the idle stretch."""
        await self._ask("text after idle", self._material.story(), 24)
        works: list[Callable[[], Awaitable[None]]]
        works = [self._agent, self._burst, self._questions, self._stories]
        for work in self._material.shuffled(works):
            await work()
        for _ in range(_FIXED_WORKS):
            self._work()
        self._round += 1
        gc.collect()  # it is off while requests are timed
        await asyncio.sleep(self._material.seconds(*_IDLE_SECONDS))

    async def _agent(self) -> None:
        """A conversation with a new picture in every turn."""
        messages: list[Message] = [self._material.system()]
        for turn in range(1, _AGENT_TURNS + 1):
            messages.append(user(f"Step {turn}: what changed?", self._material.image()))
            answer = await self._ask(f"agent, turn {turn}", messages, 12)
            messages.append(assistant(answer))
            await self._think()

    async def _burst(self) -> None:
        """Several users at once, each with a new picture."""
        asked = [[user(DESCRIBE, self._material.image())] for _ in range(_BURST_USERS)]
        await asyncio.gather(*(self._ask("burst", messages, 24) for messages in asked))

    async def _questions(self) -> None:
        """One user, who asks several things about one picture."""
        image = self._material.image()
        for number, question in enumerate(QUESTIONS[:_QUESTIONS]):
            kind = "known picture" if number else "new picture"
            await self._ask(kind, [user(question, image)], 16)
            await self._think()

    async def _stories(self) -> None:
        for _ in range(_STORIES):
            await self._ask("text", self._material.story(), 48)
            await self._think()

    async def _ask(self, kind: str, messages: list[Message], max_tokens: int) -> str:
        round_, sent = self._round, self.elapsed_seconds
        answer = await self._client.ask(messages, max_tokens)
        self.samples.append(Sample(kind, round_, sent, answer.ttft))
        return answer.text

    def _work(self) -> None:
        """Make the same picture smaller, while no request is under way."""
        sent, start = self.elapsed_seconds, time.perf_counter()
        self._picture.resize((500, 375), Image.Resampling.LANCZOS)
        seconds = time.perf_counter() - start
        self.samples.append(Sample(FIXED_WORK, self._round, sent, seconds))

    async def _think(self) -> None:
        await asyncio.sleep(self._material.seconds(*_THINK_SECONDS))
