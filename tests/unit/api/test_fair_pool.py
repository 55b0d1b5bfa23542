"""Jobs of API keys in child processes: their outcomes, their errors, and their turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from tests.unit.api.answering_child import Told
from vlm_server.api.fair_pool import FairPool
from vlm_server.errors import InvalidImage, RequestError, RequestTooCostly
from vlm_server.platform.child.pool import ChildFailed, ChildTimeout

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
