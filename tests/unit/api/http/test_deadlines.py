"""Deadlines: request headers, the engine's share, and the front's own timers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator

import httpx
import msgspec
import pytest

from tests.unit.api.conftest import Connect, listening
from tests.unit.api.http.test_transport import raw
from tests.unit.api.requests import ROUTE, chat
from tests.unit.api.scripted_engine import HELLO, ScriptedEngine, Step, failed, never, text
from vlm_server import settings
from vlm_server.api.http import deadlines
from vlm_server.api.http.deadlines import HEADERS, RequestClock
from vlm_server.protocol import Accepted, Deadlines, OnDevice
from vlm_server.settings import Settings
from vlm_server.supervisor.engine_process.client import RequestEvent

NONE = settings.DeadlineSettings(None, None, None, None)
begins: Step = lambda request_id: OnDevice((request_id,))  # noqa: E731


def within(**deadlines: float) -> Settings:
    """Settings with only the given deadlines."""
    return Settings(deadlines=msgspec.structs.replace(NONE, **deadlines))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "_GRACE_SECONDS", 0.05)


# ---- deadlines in headers --------------------------------------------------------------


def test_timeout_header_shortens_and_never_extends() -> None:
    limits = settings.DeadlineSettings(10, 20, None, 40)
    headers = {
        "X-Queue-Timeout-Ms": "2500",
        "X-First-Token-Timeout-Ms": "999999999",
        "X-Token-Timeout-Ms": "7000",
    }
    left = RequestClock(headers, limits).remaining()
    assert left.queue_timeout_seconds == pytest.approx(2.5, abs=0.2)
    assert left.first_token_timeout_seconds == pytest.approx(20, abs=0.2)
    assert left.token_timeout_seconds == 7, "where the settings have none, it is the client's"
    assert left.total_timeout_seconds == pytest.approx(40, abs=0.2)
    assert RequestClock({}, NONE).remaining() == Deadlines()


async def test_engine_gets_remaining_deadlines(connect: Connect, engine: ScriptedEngine) -> None:
    client = connect()
    await client.post(ROUTE, json=chat(), headers={"x-request-timeout-ms": "5000"})
    remaining = engine.submitted[0].deadlines
    usual = Settings().deadlines
    assert remaining.total_timeout_seconds is not None
    assert 3 < remaining.total_timeout_seconds < 5, "what the front took is taken off"
    assert usual.queue_timeout_seconds is not None
    assert remaining.queue_timeout_seconds is not None
    assert 0 < usual.queue_timeout_seconds - remaining.queue_timeout_seconds < 2
    assert remaining.token_timeout_seconds == usual.token_timeout_seconds


@pytest.mark.parametrize("header", sorted(HEADERS.values()))
@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "1e3", "inf", "nan", "1 0", "9" * 13, "²"])
async def test_invalid_timeout_header_is_400(
    client: httpx.AsyncClient, engine: ScriptedEngine, header: str, value: str
) -> None:
    headers = [(header.encode(), value.encode("latin-1"))]
    answer = await client.post(ROUTE, json=chat(), headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == header
    assert engine.submitted == []


# ---- before the engine has the request -------------------------------------------------


async def test_slow_body_ends_with_total_timeout() -> None:
    limit = within(total_timeout_seconds=0.1)
    async with listening(ScriptedEngine(), limit) as port, raw(port) as client:
        client.send(b'{"model"', "Content-Length: 1000")
        assert await client.status() == 504
        assert b"total_timeout" in await client.until(b"}}")


# ---- after the engine has the request --------------------------------------------------


@pytest.mark.parametrize("code", ["queue_timeout", "first_token_timeout", "total_timeout"])
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_timeout_is_504_with_retry_after(
    client: httpx.AsyncClient, engine: ScriptedEngine, code: str, stream: bool
) -> None:
    engine.script = (failed(code, "too late"),)
    answer = await client.post(ROUTE, json=chat(stream=stream))
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, code)
    assert int(answer.headers["retry-after"]) >= 1


SILENT: list[tuple[str, tuple[Step, ...], str]] = [
    ("queue_timeout_seconds", (), "queue_timeout"),
    ("first_token_timeout_seconds", (begins,), "first_token_timeout"),
    ("total_timeout_seconds", (begins,), "total_timeout"),
]


@pytest.mark.parametrize(("setting", "script", "code"), SILENT)
@pytest.mark.parametrize("stream", [False, True])
async def test_unresponsive_engine_ends_with_504_at_deadline(
    connect: Connect,
    engine: ScriptedEngine,
    setting: str,
    script: tuple[Step, ...],
    code: str,
    stream: bool,
) -> None:
    engine.script = (*script, never())
    client = connect(within(**{setting: 0.3}))
    answer = await asyncio.wait_for(client.post(ROUTE, json=chat(stream=stream)), 5)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, code)
    assert engine.aborted == [engine.submitted[0].request_id]
    assert (await client.get("/v1/status")).json()["requests"]["in_flight"] == 0


@pytest.mark.parametrize(
    ("setting", "code"),
    [("token_timeout_seconds", "token_timeout"), ("total_timeout_seconds", "total_timeout")],
)
async def test_deadline_in_running_stream_is_event(
    connect: Connect, engine: ScriptedEngine, setting: str, code: str
) -> None:
    engine.script = (begins, text("one"), never())
    client = connect(within(**{setting: 0.5}))
    answer = await asyncio.wait_for(client.post(ROUTE, json=chat(stream=True)), 5)
    assert answer.status_code == 200
    *_, last = [line for line in answer.text.splitlines() if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
    assert engine.aborted == [engine.submitted[0].request_id]


async def test_queue_deadline_ends_once_engine_begins(
    connect: Connect, engine: ScriptedEngine
) -> None:
    release = asyncio.Event()
    engine.script = (begins, release, *HELLO)
    client = connect(within(queue_timeout_seconds=0.05))
    asking = asyncio.create_task(client.post(ROUTE, json=chat()))
    await asyncio.wait_for(engine.waiting.wait(), 5)
    await asyncio.sleep(0.3)
    release.set()
    assert (await asking).status_code == 200


async def test_resumed_front_reads_events_before_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The front was suspended: the engine's events are there, its timer is late."""
    monkeypatch.setattr(deadlines, "_STOPPED_SECONDS", 0.2)
    clock = RequestClock({}, within(first_token_timeout_seconds=0.1).deadlines)

    async def says_something_soon() -> AsyncGenerator[RequestEvent, None]:
        await asyncio.sleep(0.01)
        yield Accepted("a")

    async with asyncio.timeout(5):
        watched = clock.watch(says_something_soon(), lambda: None)
        waiting = asyncio.create_task(anext(watched))
        await asyncio.sleep(0)
        time.sleep(0.5)  # noqa: ASYNC251  stopped
        assert await waiting == Accepted("a")
