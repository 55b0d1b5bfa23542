"""Queue slots and waiting bytes: limits, fair shares, and retry times."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack

import httpx
import pytest

from tests.support.clock import Clock
from tests.unit.api.conftest import Connect, listening
from tests.unit.api.http.test_transport import raw
from tests.unit.api.requests import ROUTE, chat
from tests.unit.api.scripted_engine import HELLO, ScriptedEngine, Step, never
from vlm_server.api.http.queue.queue_slots import FairShare, QueueSlots, ServiceRate
from vlm_server.errors import QueueFull
from vlm_server.protocol import OnDevice
from vlm_server.settings import Limits, Server, Settings

KIB, MIB = 1 << 10, 1 << 20
FREE = 64 * KIB
begins: Step = lambda request_id: OnDevice((request_id,))  # noqa: E731


class Queue:
    """Queue slots with holders named by the test."""

    def __init__(self, **limits: int) -> None:
        self.clock = Clock()
        self.slots = QueueSlots(Limits(**limits), self.clock)
        self.held: list[tuple[str, ExitStack]] = []

    def take(self, client: str, num_bytes: int = 0) -> bool:
        stack = ExitStack()
        try:
            stack.enter_context(self.slots.hold(client, num_bytes))
        except QueueFull:
            return False
        self.held.append((client, stack))
        return True

    def end(self, client: str) -> None:
        entry = next(holder for holder in self.held if holder[0] == client)
        self.held.remove(entry)
        entry[1].close()

    def count(self, client: str) -> int:
        return sum(holder == client for holder, _ in self.held)

    def fill(self, client: str) -> int:
        """Take every free slot; returns the number taken."""
        before = self.count(client)
        while self.take(client):
            pass
        return self.count(client) - before


# ---- fair shares -----------------------------------------------------------------------


def test_single_client_gets_every_slot() -> None:
    assert Queue(max_requests=8).fill("a") == 8


def test_freed_slot_goes_to_waiting_client() -> None:
    queue = Queue(max_requests=8)
    queue.fill("a")
    assert not queue.take("b")
    for _ in range(4):
        queue.end("a")
        assert not queue.take("a"), "the other one wants it"
        assert queue.take("b")
    queue.end("a")
    assert queue.take("a"), "each has its half"
    assert not queue.take("b")


def test_client_that_stopped_asking_loses_its_share() -> None:
    queue = Queue(max_requests=8)
    queue.fill("a")
    assert not queue.take("b")
    queue.end("a")
    assert not queue.take("a")
    queue.clock.now += 100
    assert queue.take("a")


def test_three_greedy_clients_get_equal_shares() -> None:
    queue = Queue(max_requests=9)
    queue.fill("a")
    for _ in range(60):
        queue.end(queue.held[0][0])
        for client in "abc":
            queue.take(client)
    assert [queue.count(client) for client in "abc"] == [3, 3, 3]


def test_clients_more_than_slots_get_one_slot_each() -> None:
    queue = Queue(max_requests=3)
    for number in range(50):
        queue.take(f"client {number}")
    for number in range(50):
        queue.end(queue.held[0][0])
        assert queue.take(f"client {49 - number}") == (f"client {49 - number}" not in queue.held)


def test_fair_share_forgets_clients_without_requests() -> None:
    share = FairShare(10)
    for number in range(100):
        client = f"client {number}"
        assert share.has_room(client, 1, float(number))
        share.take(client, 1)
        share.release(client, 1)
    assert share.taken == 0
    assert not share._held
    assert not share._wants


def test_slot_is_reserved_for_waiting_client() -> None:
    queue = Queue(max_requests=8)
    queue.fill("a")
    assert not queue.take("b")
    for _ in range(5):
        queue.end("a")
    assert queue.fill("a") == 4, "one of five is for b, which has not asked for more"
    assert queue.take("b")


async def test_key_cannot_take_all_slots_while_another_waits(
    connect: Connect, engine: ScriptedEngine
) -> None:
    release = asyncio.Event()
    engine.script = (release, *HELLO)
    keys = ("first-long-key", "second-long-key")
    client = connect(
        Settings(limits=Limits(max_requests=4), server=Server(api_keys=keys)),
    )

    async def ask(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return (await client.post(ROUTE, json=chat(), headers=headers)).status_code

    greedy = [asyncio.create_task(ask(keys[0])) for _ in range(3)]
    while len(engine.submitted) < 3:  # noqa: ASYNC110  the engine is only a script
        await asyncio.sleep(0.001)
    other = asyncio.create_task(ask(keys[1]))
    while len(engine.submitted) < 4:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert await ask(keys[0]) == 429
    release.set()
    assert await asyncio.gather(*greedy, other) == [200] * 4
    assert len({submit.client for submit in engine.submitted}) == 2
    assert not [s for s in engine.submitted if any(key in s.client for key in keys)]


# ---- bytes -----------------------------------------------------------------------------


def test_body_over_waiting_bytes_is_refused() -> None:
    queue = Queue(max_body_bytes=MIB, max_waiting_bytes=2 * MIB)
    assert queue.take("a", MIB)
    assert queue.take("a", MIB)
    assert not queue.take("a", MIB)
    assert queue.slots.requests.taken == 2, "a refusal takes no slot"
    assert queue.take("a", FREE), "a short one is never in the way"
    assert queue.slots.waiting_bytes.taken == 2 * (MIB - FREE)
    queue.end("a")
    assert queue.take("a", MIB)


def test_largest_body_always_fits_once() -> None:
    queue = Queue(max_body_bytes=MIB, max_waiting_bytes=10)
    assert queue.slots.waiting_bytes.limit == MIB
    for client in ("x", "y", "z"):
        queue.take(client, FREE + 1)
    for client in ("x", "y", "z"):
        queue.end(client)
    assert queue.take("a", MIB), "however many clients there are"


def test_default_waiting_bytes_fit_four_bodies() -> None:
    limit = QueueSlots(Limits()).waiting_bytes.limit
    assert limit >= 4 * Limits().max_body_bytes


SMALL = Settings(limits=Limits(max_body_bytes=MIB, max_waiting_bytes=MIB))


def body_of(num_bytes: int) -> bytes:
    body = json.dumps(chat()).encode()
    return body + b" " * (num_bytes - len(body))


async def test_bytes_are_refused_before_body_is_read() -> None:
    engine = ScriptedEngine(never())
    async with (
        listening(engine, SMALL) as port,
        raw(port) as second,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        headers = {"content-type": "application/json"}
        first = asyncio.create_task(client.post(ROUTE, content=body_of(MIB), headers=headers))
        await asyncio.wait_for(engine.waiting.wait(), 5)
        second.send(b"", f"Content-Length: {MIB}")
        assert await second.status() == 429
        head = (await second.until(b"\r\n\r\n")).lower()
        assert b"retry-after: " in head
        assert (await client.get("/v1/status")).json()["requests"]["waiting_bytes"] > 0
        first.cancel()
        await wait_until_nothing_waits(client)


async def test_unsent_body_takes_no_waiting_bytes() -> None:
    engine = ScriptedEngine(*HELLO)
    async with (
        listening(engine, SMALL) as port,
        raw(port) as slow,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        slow.send(b"{", f"Content-Length: {MIB}")
        await asyncio.sleep(0.1)
        assert (await client.get("/v1/status")).json()["requests"]["waiting_bytes"] == 0
        headers = {"content-type": "application/json"}
        answer = await client.post(ROUTE, content=body_of(MIB), headers=headers)
        assert answer.status_code == 200


async def wait_until_nothing_waits(client: httpx.AsyncClient) -> None:
    for _ in range(500):
        requests = (await client.get("/v1/status")).json()["requests"]
        if not (requests["in_flight"] or requests["waiting_bytes"]):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(requests)


async def test_chunked_body_is_counted_after_its_arrival() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield body_of(MIB // 2)
        for _ in range(8):
            await asyncio.sleep(0)
            yield b" " * (MIB // 20)

    release = asyncio.Event()
    engine = ScriptedEngine(release, *HELLO)
    headers = {"content-type": "application/json"}
    async with (
        listening(engine, SMALL) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        first = asyncio.create_task(client.post(ROUTE, content=chunks(), headers=headers))
        await asyncio.wait_for(engine.waiting.wait(), 5)
        second = await client.post(ROUTE, content=chunks(), headers=headers)
        assert second.status_code == 429
        release.set()
        assert (await first).status_code == 200
        await wait_until_nothing_waits(client)


async def test_waiting_bytes_are_freed_when_engine_begins(
    connect: Connect, engine: ScriptedEngine
) -> None:
    client = connect(SMALL)
    headers = {"content-type": "application/json"}
    release = asyncio.Event()
    for script, status in (((never(),), 429), ((begins, release, *HELLO), 200)):
        engine.script, engine.waiting = script, asyncio.Event()
        first = asyncio.create_task(client.post(ROUTE, content=body_of(MIB), headers=headers))
        await asyncio.wait_for(engine.waiting.wait(), 5)
        engine.script = HELLO
        second = await client.post(ROUTE, content=body_of(MIB), headers=headers)
        assert second.status_code == status
        assert (await client.post(ROUTE, json=chat())).status_code == 200, "a short one passes"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await wait_until_nothing_waits(client)


# ---- Retry-After -----------------------------------------------------------------------


def test_service_rate_covers_last_minute() -> None:
    rate = ServiceRate()
    assert rate.seconds_for(0, 100.0) == 1
    rate.begin(100.0)
    assert rate.seconds_for(10, 105.0) == 5, "as long again as until now"
    for number in range(20):
        rate.end(100.0 + number / 2)  # two a second
    assert rate.seconds_for(64, 110.0) == pytest.approx(32)
    assert rate.seconds_for(8, 110.0) == pytest.approx(4)
    assert rate.seconds_for(1, 110.0) == 1
    assert rate.seconds_for(640, 110.0) == 60
    assert rate.seconds_for(8, 190.0) == 60, "nothing ended for a minute"


def test_service_rate_of_many_ends_covers_less_time() -> None:
    rate = ServiceRate()
    rate.begin(0.0)
    for number in range(3000):
        rate.end(number / 100)
    assert rate.seconds_for(500, 30.0) == pytest.approx(5, rel=0.02)


def test_retry_after_grows_with_load() -> None:
    retry_seconds: dict[float, set[float]] = {}
    for seconds in (0.01, 0.5, 5.0):
        queue = Queue(max_requests=8)
        queue.fill("a")
        for _ in range(40):
            queue.clock.now += seconds
            queue.end("a")
            queue.take("a")
        retry_seconds[seconds] = {queue.slots.retry_after_seconds() for _ in range(100)}
    assert retry_seconds[0.01] == {1}
    assert 2 <= min(retry_seconds[0.5]) <= max(retry_seconds[0.5]) <= 4.2
    assert 18 <= min(retry_seconds[5.0]) <= max(retry_seconds[5.0]) <= 42
    assert len(retry_seconds[5.0]) > 50, "not all at once"
