"""The order of a soak: warm-up, then load and rest in turn."""

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
_LOAD_REQUESTS = 500
"""Between two rests."""
_REST_SECONDS = 3.0
_STATS_SECONDS = 1.0
"""Time for the engine's stats to arrive at the front."""


class Plan(msgspec.Struct, frozen=True):
    """Minutes of load, without the rests; the seed; the maximum number of users."""

    minutes: float
    seed: int
    users: int


class Result(msgspec.Struct, frozen=True):
    """All observations. `rests` are readings without load and with the same cache contents.

    A rest is None if the daemon did not answer; there are at least two.
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
    """Run `plan` against the daemon at `url`, which does not end in `/v1`."""
    async with Client(url) as client:
        crowd = Crowd(client.send, plan.seed, plan.users)
        readings = Readings(url, lambda: (len(crowd.outcomes), crowd.size))
        watching = asyncio.create_task(readings.watch())
        try:
            left = await _load(crowd, 60 * plan.minutes, _is_warm(crowd, 60 * plan.minutes))
            await crowd.ask_in_turn(schemas())
            rests = [await _at_rest(crowd, readings, plan.seed)]
            while len(rests) < 2 or left > 0:
                left = await _load(crowd, left, _has_more(crowd, _LOAD_REQUESTS))
                rests.append(await _at_rest(crowd, readings, plan.seed))
        finally:
            watching.cancel()
    return Result(plan, crowd.outcomes, readings.all, rests, client.waits)


async def _load(crowd: Crowd, seconds: float, is_enough: Callable[[], bool]) -> float:
    """Let the crowd ask for `seconds` or until `is_enough()`. Returns the seconds left."""
    until = time.perf_counter() + seconds
    await crowd.run(lambda: time.perf_counter() >= until or is_enough())
    return until - time.perf_counter()


def _is_warm(crowd: Crowd, seconds: float) -> Callable[[], bool]:
    """After a share of the time and some requests, whichever is later; at most half the time."""
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
    """A reading with the refills in the caches and no load.

    The engine reports its memory when something happens, and MLX frees the last arrays of a step
    a moment after it. So one more request, which does not use the device, makes it report again.
    """
    await crowd.ask_in_turn(refills(seed))
    await asyncio.sleep(_REST_SECONDS)
    await crowd.ask_in_turn([refused_by_engine(random_image(random.Random(seed)))])
    await asyncio.sleep(_STATS_SECONDS)
    return await readings.read()
