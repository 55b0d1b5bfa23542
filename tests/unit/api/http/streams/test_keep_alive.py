"""A silent stream tells its own request's progress, to clients that ask for it."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace

import httpx
import pytest

from tests.unit.api.conftest import Connect
from tests.unit.api.scripted_engine import ScriptedEngine, ended, finished, text
from vlm_server.api.http.streams import keep_alive
from vlm_server.protocol import MemoryStats, RequestProgress, Stats

BODY = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
MEMORY = MemoryStats(0, 0, 0, 0, 0, 0, 0, {}, 0.0)
PROGRESS = {"X-VLM-Progress": "1"}


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_alive, "_PROGRESS_SECONDS", 0.02)


async def streamed(
    client: httpx.AsyncClient, engine: ScriptedEngine, headers: dict[str, str], route: str
) -> str:
    """A stream with a pause of several silences, during which its prompt is read."""
    pause = asyncio.Event()
    engine.script = (pause, text("Hello"), ended(), finished())
    asking = asyncio.create_task(client.post(route, json=BODY, headers=headers))
    await engine.waiting.wait()
    report = RequestProgress(engine.submitted[0].request_id, "prefill", 512, 2048)
    other = RequestProgress("chatcmpl-other", "decode", 1, 9)
    stats = Stats({}, 2, {}, MEMORY, 0, progress=(other, report))
    engine.status = replace(engine.status, stats=stats)
    await asyncio.sleep(0.2)
    pause.set()
    return (await asking).text


async def test_silent_stream_tells_progress_of_its_own_request(
    connect: Connect, engine: ScriptedEngine
) -> None:
    shown = await streamed(connect(), engine, PROGRESS, "/v1/chat/completions")
    comments = [line for line in shown.splitlines() if line.startswith(": ")]
    told = [json.loads(comment.removeprefix(": progress ")) for comment in comments]
    assert {"state": "prefill", "done": 512, "total": 2048, "ahead": 0} in told
    assert all(one.get("state") in ("sent", "prefill") for one in told)
    assert shown.endswith("data: [DONE]\n\n")


async def test_silent_stream_tells_number_of_earlier_requests(
    connect: Connect, engine: ScriptedEngine
) -> None:
    client = connect()
    engine.script = (wait := asyncio.Event(), text("Hello"), ended(), finished())
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    asking = []
    for _ in range(3):
        engine.waiting.clear()
        post = client.post("/v1/chat/completions", json=body, headers=PROGRESS)
        asking.append(asyncio.create_task(post))
        await asyncio.wait_for(engine.waiting.wait(), 5)
    await asyncio.sleep(0.2)
    wait.set()
    answers = await asyncio.gather(*asking)
    ahead = [re.search(r'"ahead":(\d)', answer.text) for answer in answers]
    assert [match and match[1] for match in ahead] == ["0", "1", "2"]


async def test_silent_stream_tells_stage_of_loading(
    connect: Connect, engine: ScriptedEngine
) -> None:
    engine.status = replace(engine.status, progress=("loading the weights", 0.25))
    shown = await streamed(connect(), engine, PROGRESS, "/v1/chat/completions")
    told = {"state": "waiting_for_model", "stage": "loading the weights", "fraction": 0.25}
    assert f": progress {json.dumps(told, separators=(',', ':'))}\n\n" in shown


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/api/chat"])
async def test_progress_is_for_event_streams_that_ask(
    connect: Connect, engine: ScriptedEngine, route: str
) -> None:
    headers = PROGRESS if route == "/api/chat" else {}
    shown = await streamed(connect(), engine, headers, route)
    assert "progress" not in shown
    assert "Hello" in shown
