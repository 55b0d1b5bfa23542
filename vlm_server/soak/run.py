"""The order of a soak: warm up, read, load, read again. Knows no thresholds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from vlm_server.soak.client import Client
from vlm_server.soak.crowd import Crowd
from vlm_server.soak.mix import refills
from vlm_server.soak.readings import Reading, Readings
from vlm_server.soak.request import Outcome

_WARM_UP_SHARE = 0.1
_WARM_UP_REQUESTS = 200
_WARM_UP_MOST = 0.5
_REST_SECONDS = 3.0
"""Longer than the second by which what the engine says may be old."""


class Plan(msgspec.Struct, frozen=True):
    """How long to ask, what is drawn, and how many users there are at most."""

    minutes: float
    seed: int
    users: int


class Result(msgspec.Struct, frozen=True):
    """All that was seen. `start` and `end` are at rest, with the caches filled the same way.

    They are None if the daemon said nothing then.
    """

    plan: Plan
    outcomes: list[Outcome]
    readings: list[Reading]
    start: Reading | None
    end: Reading | None
    waits: int


async def soak(url: str, plan: Plan) -> Result:
    """Ask the daemon at `url`, without `/v1`, for `plan.minutes`."""
    async with Client(url) as client:
        crowd = Crowd(client.send, plan.seed, plan.users)
        readings = Readings(url, lambda: (len(crowd.outcomes), crowd.size))
        watching = asyncio.create_task(readings.watch())
        try:
            seconds = 60 * plan.minutes
            begin = time.perf_counter()
            await crowd.run(_is_warm(crowd, seconds))
            warming_seconds = time.perf_counter() - begin
            start = await _at_rest(crowd, readings, plan.seed)
            await crowd.run(_is_over(seconds - warming_seconds))
            end = await _at_rest(crowd, readings, plan.seed)
        finally:
            watching.cancel()
    return Result(plan, crowd.outcomes, readings.all, start, end, client.waits)


def _is_over(seconds: float) -> Callable[[], bool]:
    until = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= until


def _is_warm(crowd: Crowd, seconds: float) -> Callable[[], bool]:
    """After a share of the time and some requests, whatever is later, but at half-time."""
    enough, most = _is_over(_WARM_UP_SHARE * seconds), _is_over(_WARM_UP_MOST * seconds)
    return lambda: most() or (enough() and len(crowd.outcomes) >= _WARM_UP_REQUESTS)


async def _at_rest(crowd: Crowd, readings: Readings, seed: int) -> Reading | None:
    await crowd.ask_in_turn(refills(seed))
    await asyncio.sleep(_REST_SECONDS)
    return await readings.read()
