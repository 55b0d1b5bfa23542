"""Turns of API keys: in fair order, bounded in all and for each key."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.unit.api.answering_child import Told
from vlm_server.api.fair_turns import FairOrder, FairPool, FairTurns
from vlm_server.errors import InvalidImage, RequestError, RequestTooCostly
from vlm_server.platform.child.pool import ChildFailed, ChildTimeout


def served(order: FairOrder, owners: str, times: int) -> str:
    """The owners served, each at the cost of 1."""
    names = ""
    for _ in range(times):
        owner = min(owners, key=order.place)
        order.begin(owner)
        order.charge(owner, 1)
        names += owner
    return names


def test_owner_that_comes_late_alternates_with_others() -> None:
    """It does not make up for the time in which it wanted nothing."""
    order = FairOrder()
    served(order, "a", 1000)
    assert Counter(served(order, "ab", 20)) == {"a": 10, "b": 10}
    served(order, "b", 1000)
    assert 9 <= served(order, "ab", 20).count("a") <= 11


async def test_owner_with_long_turns_has_fewer() -> None:
    turns, order = FairTurns(1), list[str]()

    async def turn(owner: str, seconds: float) -> None:
        async with turns.turn(owner):
            order.append(owner)
            await asyncio.sleep(seconds)

    long = [turn("long", 0.1) for _ in range(6)]
    await asyncio.gather(*long, *(turn("short", 0.001) for _ in range(20)))
    assert order[:22].count("short") == 20


async def test_owner_leaves_room_for_others() -> None:
    turns, most, running = FairTurns(3, owner_limit=2), Counter[str](), Counter[str]()

    async def turn(owner: str) -> None:
        async with turns.turn(owner):
            running[owner] += 1
            most[owner] = max(most[owner], running[owner])
            await asyncio.sleep(0.01)
            running[owner] -= 1

    greedy = [asyncio.create_task(turn("greedy")) for _ in range(8)]
    await asyncio.sleep(0.001)
    async with asyncio.timeout(0.005), turns.turn("modest"):
        pass
    await asyncio.gather(*greedy)
    assert most == {"greedy": 2}


async def test_turn_passes_over_owner_cancelled_at_that_moment() -> None:
    turns, order = FairTurns(1), list[str]()

    async def turn(owner: str) -> None:
        async with turns.turn(owner):
            order.append(owner)

    async with turns.turn("first"):
        cancelled, last = (asyncio.create_task(turn(owner)) for owner in ("cancelled", "last"))
        await asyncio.sleep(0)
        cancelled.cancel()
    await last
    assert order == ["last"]
    assert cancelled.cancelled() or cancelled.cancelling()


# ---- pools ---------------------------------------------------------------------------


SECONDS = 20.0


@pytest.fixture
def pool() -> Iterator[FairPool[Told]]:
    module = "tests.unit.api.answering_child"
    running = FairPool(module, 1, "an argument", outcome=Told, memory_bytes=1 << 30)
    yield running
    running.close()


async def test_process_gets_arguments_and_outcome_comes_back(pool: FairPool[Told]) -> None:
    assert await pool.run(b"job", "key", SECONDS) == Told(b"job", "an argument")


@pytest.mark.parametrize(
    ("job", "error", "param"),
    [(b"refuse", InvalidImage, "frame"), (b"hog", RequestTooCostly, "body")],
)
async def test_errors_of_process_are_raised_here_and_it_goes_on(
    pool: FairPool[Told], job: bytes, error: type[RequestError], param: str
) -> None:
    with pytest.raises(error) as raised:
        await pool.run(job, "key", SECONDS)
    assert raised.value.param == param
    assert (await pool.run(b"next", "key", SECONDS)).job == b"next"


async def test_dead_and_slow_processes_are_replaced(pool: FairPool[Told]) -> None:
    with pytest.raises(ChildFailed):
        await pool.run(b"die", "key", SECONDS)
    with pytest.raises(ChildTimeout):
        await pool.run(b"sleep", "key", 0.2)
    assert (await pool.run(b"next", "key", SECONDS)).job == b"next"


async def test_cancelled_job_frees_its_process(pool: FairPool[Told]) -> None:
    await pool.run(b"first", "key", SECONDS)
    sleeping = asyncio.create_task(pool.run(b"sleep", "key", SECONDS))
    await asyncio.sleep(0.1)
    began_at = time.monotonic()
    sleeping.cancel()
    assert (await pool.run(b"next", "key", SECONDS)).job == b"next"
    assert time.monotonic() - began_at < SECONDS / 2


async def test_many_jobs_of_one_key_delay_other_key_by_one(pool: FairPool[Told]) -> None:
    await pool.run(b"first", "many", SECONDS)
    ended = list[str]()

    async def run(owner: str) -> None:
        await pool.run(b"nap", owner, SECONDS)
        ended.append(owner)

    many = [asyncio.create_task(run("many")) for _ in range(5)]
    await asyncio.sleep(0.05)
    await asyncio.gather(run("one"), *many)
    assert ended.index("one") <= 1
