"""Watches whose streams are resumed: they go on without a connection, for a bounded time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.support.watching import plain
from tests.unit.api.conftest import listening
from tests.unit.api.dialects.openai.watch.test_watch import client_of, says
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.settings import Server, Settings

RESUMABLE = {"X-VLM-Resumable": "true"}
QUESTION = {"question": "What?"}
KEYS = ("key-of-one-client", "key-of-another-client")


@asynccontextmanager
async def serving(engine: ScriptedEngine, **server: Any) -> AsyncIterator[httpx.AsyncClient]:
    settings = Settings(server=Server(api_keys=KEYS, **server))
    async with listening(engine, settings) as port, client_of(port, KEYS[0]) as client:
        yield client


async def events_of(
    client: httpx.AsyncClient, headers: dict[str, str], last: str
) -> list[tuple[str, dict[str, Any]]]:
    """The ids and events of a watch, up to the first of type `last`, where its client leaves."""
    found, data = list[tuple[str, dict[str, Any]]](), {}
    async with asyncio.timeout(20):
        async with client.stream("POST", "/v1/watch", json=QUESTION, headers=headers) as response:
            assert response.status_code == 200, (await response.aread()).decode()
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    data = json.loads(line.removeprefix("data: "))
                elif line.startswith("id: "):
                    found.append((line.removeprefix("id: "), data))
                    if data["type"] == last:
                        return found
    return found


async def give(client: httpx.AsyncClient, watch_id: str, colour: str) -> httpx.Response:
    headers = {"Content-Type": "image/jpeg"}
    path = f"/v1/watch/{watch_id}/frames"
    return await client.post(path, content=plain(colour), headers=headers)


async def test_watch_goes_on_without_client_and_is_resumed() -> None:
    engine = ScriptedEngine(*says("red"))
    async with serving(engine) as client:
        ((event_id, started),) = await events_of(client, RESUMABLE, "started")
        watch_id = started["watch_id"]
        assert (await give(client, watch_id, "red")).status_code == 200
        resumed = await events_of(client, {"Last-Event-ID": event_id}, "answer")
        assert [event["answer"] for _, event in resumed] == ["red"]
        engine.script = says("blue")
        assert (await give(client, watch_id, "blue")).status_code == 200
        await client.delete(f"/v1/watch/{watch_id}")
        rest = await events_of(client, {"Last-Event-ID": resumed[-1][0]}, "end")
        assert rest[-1][1]["reason"] == "deleted"
        assert [event["type"] for _, event in rest].count("end") == 1
        every = await events_of(client, {"Last-Event-ID": event_id.partition(":")[0]}, "end")
        assert every == [(event_id, started), *resumed, *rest]


async def test_watch_of_another_key_or_route_is_not_resumed() -> None:
    engine = ScriptedEngine(*says("red"))
    async with serving(engine) as client:
        ((event_id, _),) = await events_of(client, RESUMABLE, "started")
        headers = {"Last-Event-ID": event_id}
        chat = await client.post("/v1/chat/completions", json={}, headers=headers)
        other = headers | {"Authorization": f"Bearer {KEYS[1]}"}
        foreign = await client.post("/v1/watch", json={}, headers=other)
        assert (chat.status_code, foreign.status_code) == (404, 404)


async def test_watch_without_client_ends_after_its_time() -> None:
    async with serving(ScriptedEngine(*says("red")), stream_resume_keep_seconds=0.2) as client:
        ((event_id, started),) = await events_of(client, RESUMABLE, "started")
        await asyncio.sleep(0.6)
        assert (await give(client, started["watch_id"], "red")).status_code == 404
        headers = {"Last-Event-ID": event_id}
        assert (await client.post("/v1/watch", json={}, headers=headers)).status_code == 404
        metrics = (await client.get("/metrics")).text
        assert "vlm_server_watches 0.0" in metrics
        assert "vlm_server_resumable_streams 0.0" in metrics


async def test_watch_that_is_not_resumable_ends_with_its_client() -> None:
    async with serving(ScriptedEngine(*says("red"))) as client:
        headers = {"Content-Type": "multipart/x-mixed-replace; boundary=b", **RESUMABLE}
        answer = await client.post("/v1/watch", content=b"--b--", headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-VLM-Resumable")
