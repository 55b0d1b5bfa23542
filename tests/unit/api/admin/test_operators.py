"""Operators' view: requests in flight, their cancellation, waiting times, settings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.api.conftest import Connect, parsing_pool
from tests.unit.api.requests import ROUTE, chat, image_part, text, user
from tests.unit.api.scripted_engine import OneModel, ScriptedEngine, ended, finished, never
from tests.unit.api.scripted_engine import text as says
from vlm_server.api.app import create_app
from vlm_server.protocol import MemoryStats, RequestProgress, Stats
from vlm_server.settings import Server, Settings, load_with_sources
from vlm_server.supervisor.engine_process.history import EngineEnd, MemorySample

MEMORY = MemoryStats(1, 2, 3, 4, 5, 6, 7, {}, 0.0)


async def status(client: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/v1/status")).json()
    return found


@asynccontextmanager
async def answering(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """A request with an image, submitted to an engine that does not go on."""
    engine.script = (says("Hello"), never())
    body = chat(user(text(), image_part()))
    task = asyncio.create_task(client.post(ROUTE, json=body))
    await asyncio.wait_for(engine.waiting.wait(), 5)
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_request_is_listed_with_progress_while_running(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    assert (await status(client))["requests"]["list"] == []
    async with answering(client, engine):
        (listed,) = (await status(client))["requests"]["list"]
        assert listed["id"] == engine.submitted[0].request_id
        assert (listed["route"], listed["state"], listed["images"]) == (ROUTE, "sent", 1)
        assert 0 < listed["first_token_seconds"] <= listed["seconds"] < 10
        progress = RequestProgress(listed["id"], "decode", 7, 100)
        other = RequestProgress("chatcmpl-other", "prefill", 1, 2)
        stats = Stats({}, 2, {}, MEMORY, 0, progress=(other, progress))
        engine.status = replace(engine.status, stats=stats)
        (listed,) = (await status(client))["requests"]["list"]
        assert (listed["state"], listed["done"], listed["total"]) == ("decode", 7, 100)
        assert (await status(client))["requests"]["in_flight"] == 1
    assert (await status(client))["requests"]["list"] == []


async def test_cancelled_request_is_410_which_clients_do_not_retry(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    async with answering(client, engine) as task:
        request_id = engine.submitted[0].request_id
        answer = await client.post(f"/v1/requests/{request_id}/cancel")
        assert answer.json() == {"id": request_id, "cancelled": True}
        refused = await asyncio.wait_for(task, 5)
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "request_cancelled")
    again = await client.post(f"/v1/requests/{request_id}/cancel")
    assert again.status_code == 404


async def test_key_cancels_its_own_requests_alone(
    tmp_path: Path, connect: Connect, engine: ScriptedEngine
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[laptop]\nkey = "laptop-key"\n[phone]\nkey = "another-key"\n')
    file.chmod(0o600)
    client = connect(Settings(server=Server(api_key_file=str(file))))
    client.headers["authorization"] = "Bearer laptop-key"
    async with answering(client, engine) as task:
        url = f"/v1/requests/{engine.submitted[0].request_id}/cancel"
        other = await client.post(url, headers={"authorization": "Bearer another-key"})
        assert other.status_code == 403
        assert (await client.post(url)).status_code == 200
        assert (await asyncio.wait_for(task, 5)).status_code == 410


async def test_cancelling_and_settings_need_admin_key(tmp_path: Path, connect: Connect) -> None:
    file = tmp_path / "keys.toml"
    file.write_text('[laptop]\nkey = "laptop-key"\n[ops]\nkey = "operator-key"\nadmin = true\n')
    file.chmod(0o600)
    client = connect(Settings(server=Server(api_key_file=str(file))))
    for key, cancelled, shown in (("laptop-key", 403, 403), ("operator-key", 404, 200)):
        headers = {"authorization": f"Bearer {key}"}
        answer = await client.post("/v1/requests/x/cancel", headers=headers)
        assert answer.status_code == cancelled
        assert (await client.get("/v1/settings", headers=headers)).status_code == shown
    foreign = {"authorization": "Bearer operator-key", "origin": "https://evil.example"}
    assert (await client.post("/v1/requests/x/cancel", headers=foreign)).status_code == 403


async def test_status_counts_waiting_requests(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (says("a"), says("b"), says("c"), ended(), finished())
    await client.post(ROUTE, json=chat())
    latencies = (await status(client))["latencies"]
    first, between = (
        latencies["time_to_first_token_seconds"],
        latencies["inter_token_latency_seconds"],
    )
    assert (sum(first["counts"]), sum(between["counts"])) == (1, 2)
    assert len(first["counts"]) == len(first["bounds"]) + 1
    assert 0 < first["sum"] < 10


async def test_status_shows_memory_samples_and_engine_ends(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.status = replace(
        engine.status,
        memory_samples=[MemorySample(100, 1, 2, 3, 4)],
        ends=(EngineEnd(5.5, "was ended by SIGKILL"),),
    )
    engine_status = (await status(client))["engine"]
    assert engine_status["memory_samples"] == [
        {"at": 100, "active_bytes": 1, "pool_bytes": 2, "footprint_bytes": 3, "generated_tokens": 4}
    ]
    assert engine_status["ends"] == [{"at": 5.5, "reason": "was ended by SIGKILL"}]


async def test_settings_route_shows_sources_and_hides_keys(
    tmp_path: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text("[server]\nport = 9000\n[cache]\nseparate_api_keys = false\n")
    file = Path("my.toml")
    overrides = ("server.port=9001", 'server.api_keys=["correct-horse-battery"]')
    settings, sources = load_with_sources(file, overrides)
    app = create_app(
        settings, OneModel(engine), parsing_pool(), sources=sources, settings_file=file
    )
    transport = httpx.ASGITransport(app)
    headers = {"x-api-key": "correct-horse-battery"}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        answer = await client.get("/v1/settings", headers=headers)
    assert "horse" not in answer.text
    assert answer.json()["file"] == str(tmp_path / "my.toml")
    shown_settings = {
        f"{section['name']}.{setting['name']}": setting
        for section in json.loads(answer.content)["sections"]
        for setting in section["settings"]
    }
    port, keys = shown_settings["server.port"], shown_settings["server.api_keys"]
    assert (port["value"], port["default"], port["source"]) == (9001, 8000, "command line")
    assert (keys["value"], keys["source"]) == ("(1 not shown)", "command line")
    separate = shown_settings["cache.separate_api_keys"]
    assert (separate["value"], separate["source"]) == (False, str(file))
    assert shown_settings["server.host"]["source"] == "default"
    assert all(setting["description"] for setting in shown_settings.values())
