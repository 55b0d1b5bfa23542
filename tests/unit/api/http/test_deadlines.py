"""Deadlines in the front: what a client asks for, what the engine is told, and the backstop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator

import httpx
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
from vlm_server.supervisor.client import RequestEvent

NONE = settings.DeadlineSettings(0, 0, 0, 0)
begins: Step = lambda request_id: OnDevice((request_id,))  # noqa: E731


def within(**deadlines: float) -> Settings:
    """Settings with these deadlines and no others."""
    fields = {"queue_seconds": 0, "first_token_seconds": 0, "token_seconds": 0, "total_seconds": 0}
    return Settings(deadlines=settings.DeadlineSettings(**{**fields, **deadlines}))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "_GRACE_SECONDS", 0.05)


# ---- what a client asks for ------------------------------------------------------------


def test_a_header_asks_for_less_and_never_gets_more() -> None:
    limits = settings.DeadlineSettings(10, 20, 0, 40)
    headers = {
        "X-Queue-Timeout-Ms": "2500",
        "X-First-Token-Timeout-Ms": "999999999",
        "X-Token-Timeout-Ms": "7000",
    }
    left = RequestClock(headers, limits).left()
    assert left.queue_seconds == pytest.approx(2.5, abs=0.2)
    assert left.first_token_seconds == pytest.approx(20, abs=0.2)
    assert left.token_seconds == 7, "where the settings have none, it is the client's"
    assert left.total_seconds == pytest.approx(40, abs=0.2)
    assert RequestClock({}, NONE).left() == Deadlines()


async def test_the_engine_is_told_what_is_left(connect: Connect, engine: ScriptedEngine) -> None:
    client = connect()
    await client.post(ROUTE, json=chat(), headers={"x-request-timeout-ms": "5000"})
    told = engine.submitted[0].deadlines
    usual = Settings().deadlines
    assert told.total_seconds is not None
    assert 3 < told.total_seconds < 5, "what the front took is taken off"
    assert told.queue_seconds is not None
    assert usual.queue_seconds - 2 < told.queue_seconds < usual.queue_seconds
    assert told.token_seconds == usual.token_seconds


@pytest.mark.parametrize("header", sorted(HEADERS.values()))
@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "1e3", "inf", "nan", "1 0", "9" * 13, "²"])
async def test_a_header_that_is_no_time_is_400(
    client: httpx.AsyncClient, engine: ScriptedEngine, header: str, value: str
) -> None:
    headers = [(header.encode(), value.encode("latin-1"))]
    answer = await client.post(ROUTE, json=chat(), headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == header
    assert engine.submitted == []


# ---- before the engine has the request -------------------------------------------------


async def test_a_body_that_takes_longer_than_the_request_may() -> None:
    limit = within(total_seconds=0.1)
    async with listening(ScriptedEngine(), limit) as port, raw(port) as client:
        client.send(b'{"model"', "Content-Length: 1000")
        assert await client.status() == 504
        assert b"total_timeout" in await client.until(b"}}")


# ---- the engine's end, and that of one that does not react -----------------------------


@pytest.mark.parametrize("code", ["queue_timeout", "first_token_timeout", "total_timeout"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_engines_end_is_504_with_retry_after(
    client: httpx.AsyncClient, engine: ScriptedEngine, code: str, stream: bool
) -> None:
    engine.script = (failed(code, "too late"),)
    answer = await client.post(ROUTE, json=chat(stream=stream))
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, code)
    assert int(answer.headers["retry-after"]) >= 1


SILENT: list[tuple[str, tuple[Step, ...], str]] = [
    ("queue_seconds", (), "queue_timeout"),
    ("first_token_seconds", (begins,), "first_token_timeout"),
    ("total_seconds", (begins,), "total_timeout"),
]


@pytest.mark.parametrize(("setting", "script", "code"), SILENT)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_does_not_react_is_not_waited_for(
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
    ("setting", "code"), [("token_seconds", "token_timeout"), ("total_seconds", "total_timeout")]
)
async def test_in_a_stream_that_has_begun_it_is_an_event(
    connect: Connect, engine: ScriptedEngine, setting: str, code: str
) -> None:
    engine.script = (begins, text("one"), never())
    client = connect(within(**{setting: 0.1}))
    answer = await asyncio.wait_for(client.post(ROUTE, json=chat(stream=True)), 5)
    assert answer.status_code == 200
    *_, last = [line for line in answer.text.splitlines() if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == code
    assert engine.aborted == [engine.submitted[0].request_id]


async def test_who_was_begun_in_time_is_not_in_the_queue(
    connect: Connect, engine: ScriptedEngine
) -> None:
    release = asyncio.Event()
    engine.script = (begins, release, *HELLO)
    client = connect(within(queue_seconds=0.05))
    asking = asyncio.create_task(client.post(ROUTE, json=chat()))
    await asyncio.wait_for(engine.waiting.wait(), 5)
    await asyncio.sleep(0.3)
    release.set()
    assert (await asking).status_code == 200


async def test_a_front_that_was_stopped_hears_the_engine_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The timer is late because nothing ran, not because the engine said nothing."""
    monkeypatch.setattr(deadlines, "_STOPPED_SECONDS", 0.2)
    clock = RequestClock({}, within(first_token_seconds=0.1).deadlines)

    async def says_something_soon() -> AsyncGenerator[RequestEvent, None]:
        await asyncio.sleep(0.01)
        yield Accepted("a")

    async with asyncio.timeout(5):
        watched = clock.watch(says_something_soon(), lambda: None)
        waiting = asyncio.create_task(anext(watched))
        await asyncio.sleep(0)
        time.sleep(0.5)  # noqa: ASYNC251  stopped
        assert await waiting == Accepted("a")
