"""Overload by honest and greedy clients: early refusals, and no client starves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from tests.attack.load import CHAT, Reply, at_capacity, at_rate, chat_body, health, send
from tests.support.daemons import Daemon, running_daemon

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

KEYS = ("the-first-long-key", "the-second-long-key")
SEATS = 4
MIB = 1 << 20
MAX_WAITING_BYTES = 64 * MIB


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    changes = (
        f"server.api_keys={json.dumps(KEYS)}",
        f"scheduler.max_num_seqs={SEATS}",
        "limits.max_requests=32",
        f"limits.max_waiting_bytes={MAX_WAITING_BYTES}",
    )
    arguments = [part for change in changes for part in ("--set", change)]
    with running_daemon(tmp_path_factory.mktemp("overload"), *arguments) as running:
        yield running


@pytest.fixture(autouse=True)
async def idle_afterwards(daemon: Daemon) -> AsyncIterator[None]:
    """A check after the test: nothing is held, and the next request is answered."""
    yield
    await wait_idle(daemon)
    reply = await ask(daemon, chat_body(4))
    assert reply.status == 200, reply.body


def authorization(key: str) -> str:
    return f"Authorization: Bearer {key}"


async def ask(daemon: Daemon, body: bytes, *headers: str, key: str = KEYS[0]) -> Reply:
    return await send(daemon.port, "POST", CHAT, body, authorization(key), *headers)


async def status(daemon: Daemon) -> dict[str, dict[str, object]]:
    reply = await send(daemon.port, "GET", "/v1/status", b"", authorization(KEYS[0]))
    return json.loads(reply.body)  # type: ignore[no-any-return]


async def wait_idle(daemon: Daemon, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        now = await status(daemon)
        stats = now["engine"]["stats"]
        assert isinstance(stats, dict)
        held = [now["requests"]["in_flight"], now["requests"]["waiting_bytes"]]
        if not any([*held, *stats["tracked_by"].values()]):
            return
        assert time.monotonic() < deadline, now
        await asyncio.sleep(0.1)


async def num_decoding(daemon: Daemon) -> int:
    stats = (await status(daemon))["engine"]["stats"]
    assert isinstance(stats, dict)
    return int(stats["requests"]["decode"])


@asynccontextmanager
async def all_slots_taken(daemon: Daemon) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(ask(daemon, long_body())) for _ in range(SEATS)]
    try:
        async with asyncio.timeout(30):
            while await num_decoding(daemon) < SEATS:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def long_body(**fields: object) -> bytes:
    request = json.loads(chat_body(1))
    del request["max_tokens"]
    return json.dumps({**request, **fields}).encode()


# ---- overload --------------------------------------------------------------------------


async def test_tenfold_overload_is_refused_early_and_rest_served(daemon: Daemon) -> None:
    """The bounds are loose, as two busy cores may be shared; `tests.attack.load` measures."""
    usual = await at_capacity(daemon.port, 4, SEATS, 32, KEYS[0])
    assert set(usual.statuses) == {200}
    rate = min(10 * usual.goodput, 400.0)
    load, live = await asyncio.gather(
        at_rate(daemon.port, 7, rate, 32, KEYS), health(daemon.port, 7)
    )
    assert set(load.statuses) == {200, 429}
    assert load.goodput >= 0.4 * usual.goodput
    assert max(live) < 2.0
    refused = [reply for reply in load.replies if reply.status == 429]
    assert {reply.code for reply in refused} == {"queue_full"}
    retry_seconds = [reply.retry_after_seconds or 0 for reply in refused]
    assert 1 <= min(retry_seconds) < max(retry_seconds) <= 60, "it depends on the load"
    assert sorted(reply.seconds for reply in refused)[len(refused) // 2] < 1.0


async def test_occasional_client_is_served_during_flood(daemon: Daemon) -> None:
    flood = asyncio.create_task(at_rate(daemon.port, 7, 40, 32, KEYS[:1]))
    await asyncio.sleep(2)
    answered, tries = 0, 0
    async with asyncio.timeout(60):
        while answered < 3:
            tries += 1
            reply = await ask(daemon, chat_body(8), key=KEYS[1])
            answered += reply.status == 200
            if reply.status == 429:
                await asyncio.sleep(0.2)
        replies = (await flood).statuses
    assert replies[429] > 0, "it was a flood"
    assert tries <= 20, "a place is kept for who waits"


# ---- bytes -----------------------------------------------------------------------------


async def test_announced_bodies_are_refused_before_they_arrive(daemon: Daemon) -> None:
    most = MAX_WAITING_BYTES - MIB
    async with all_slots_taken(daemon):
        waiting = asyncio.create_task(ask(daemon, chat_body(4).ljust(most)))
        async with asyncio.timeout(20):
            while not (await status(daemon))["requests"]["waiting_bytes"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
        head = [f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        head += [authorization(KEYS[0]), f"Content-Length: {most}", "", ""]
        writer.write("\r\n".join(head).encode())
        line = await asyncio.wait_for(reader.readline(), 5)
        assert int(line.split()[1]) == 429
        reply = await ask(daemon, chat_body(4), "X-Queue-Timeout-Ms: 300")
        assert reply.code == "queue_timeout", "a short text may wait, too"
        writer.transport.abort()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


# ---- deadlines -------------------------------------------------------------------------


async def test_queue_timeout_is_504_with_retry_after(daemon: Daemon) -> None:
    async with all_slots_taken(daemon):
        reply = await ask(daemon, chat_body(4), "X-Queue-Timeout-Ms: 300")
    assert (reply.status, reply.code) == (504, "queue_timeout")
    assert 0.3 <= reply.seconds < 5
    assert reply.retry_after_seconds


@pytest.mark.parametrize(
    ("header", "code"),
    [
        ("X-First-Token-Timeout-Ms: 1", "first_token_timeout"),
        ("X-Request-Timeout-Ms: 700", "total_timeout"),
    ],
)
async def test_slow_answer_ends_with_its_timeout_code(
    daemon: Daemon, header: str, code: str
) -> None:
    reply = await ask(daemon, long_body(), header)
    assert (reply.status, reply.code) == (504, code)
    assert reply.seconds < 5


async def test_stream_timeout_is_last_event(daemon: Daemon) -> None:
    reply = await ask(daemon, long_body(stream=True), "X-Request-Timeout-Ms: 1500")
    assert reply.status == 200
    assert b'"code":"total_timeout"' in reply.body
    assert b"[DONE]" not in reply.body
    assert reply.body.count(b'"error"') == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_request_to_stopped_engine_ends_at_its_deadline(daemon: Daemon, stream: bool) -> None:
    pid = (await status(daemon))["engine"]["pid"]
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGSTOP)
    try:
        reply = await ask(daemon, long_body(stream=stream), "X-Request-Timeout-Ms: 500")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (reply.status, reply.code) == (504, "total_timeout")
    assert 0.5 <= reply.seconds < 8
