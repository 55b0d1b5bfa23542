"""The order of a soak: warm up, then load and rest in turn. Knows no thresholds."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import msgspec

from tests.soak.client import Client
from tests.soak.crowd import Crowd
from tests.soak.malformed import refused_by_engine
from tests.soak.mix import random_image, refills, schemas
from tests.soak.readings import Reading, Readings
from tests.soak.request import Outcome

_WARM_UP_SHARE = 0.1
_WARM_UP_REQUESTS = 200
_WARM_UP_MOST = 0.5
_STRETCH_REQUESTS = 500
"""From one rest to the next."""
_REST_SECONDS = 3.0
_NEWS_SECONDS = 1.0
"""Within which what the engine says is heard."""


class Plan(msgspec.Struct, frozen=True):
    """How long to ask, without the rests; what is drawn; how many users there are at most."""

    minutes: float
    seed: int
    users: int


class Result(msgspec.Struct, frozen=True):
    """All that was seen. `rests` are readings with the same in the caches and nobody asking.

    They are None where the daemon said nothing; there are two at least.
    """

    plan: Plan
    outcomes: list[Outcome]
    readings: list[Reading]
    rests: list[Reading | None]
    waits: int

    @property
    def start(self) -> Reading | None:
        return self.rests[0]

    @property
    def end(self) -> Reading | None:
        return self.rests[-1]


async def soak(url: str, plan: Plan) -> Result:
    """Ask the daemon at `url`, without `/v1`, for `plan.minutes`."""
    async with Client(url) as client:
        crowd = Crowd(client.send, plan.seed, plan.users)
        readings = Readings(url, lambda: (len(crowd.outcomes), crowd.size))
        watching = asyncio.create_task(readings.watch())
        try:
            left = await _load(crowd, 60 * plan.minutes, _is_warm(crowd, 60 * plan.minutes))
            await crowd.ask_in_turn(schemas())
            rests = [await _at_rest(crowd, readings, plan.seed)]
            while len(rests) < 2 or left > 0:
                left = await _load(crowd, left, _has_more(crowd, _STRETCH_REQUESTS))
                rests.append(await _at_rest(crowd, readings, plan.seed))
        finally:
            watching.cancel()
    return Result(plan, crowd.outcomes, readings.all, rests, client.waits)


async def _load(crowd: Crowd, seconds: float, is_enough: Callable[[], bool]) -> float:
    """Let the crowd ask for `seconds` or until it is enough; how many of them are left."""
    until = time.perf_counter() + seconds
    await crowd.run(lambda: time.perf_counter() >= until or is_enough())
    return until - time.perf_counter()


def _is_warm(crowd: Crowd, seconds: float) -> Callable[[], bool]:
    """After a share of the time and some requests, whatever is later, but at half-time."""
    begin = time.perf_counter()

    def is_warm() -> bool:
        share = (time.perf_counter() - begin) / seconds
        has_asked = len(crowd.outcomes) >= _WARM_UP_REQUESTS
        return share >= _WARM_UP_MOST or (share >= _WARM_UP_SHARE and has_asked)

    return is_warm


def _has_more(crowd: Crowd, requests: int) -> Callable[[], bool]:
    goal = len(crowd.outcomes) + requests
    return lambda: len(crowd.outcomes) >= goal


async def _at_rest(crowd: Crowd, readings: Readings, seed: int) -> Reading | None:
    """A reading with the refills in the caches and nobody asking.

    The engine reads its memory when something happens, and MLX frees the last of a step a moment
    after it: so a request that brings the device nothing to do makes it read again.
    """
    await crowd.ask_in_turn(refills(seed))
    await asyncio.sleep(_REST_SECONDS)
    await crowd.ask_in_turn([refused_by_engine(random_image(random.Random(seed)))])
    await asyncio.sleep(_NEWS_SECONDS)
    return await readings.read()
