"""Operators' view of the past: requests that have ended, exact percentiles, memory, the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.api.conftest import Connect, parsing_pool
from tests.unit.api.requests import ROUTE, chat, image_part, text, user
from tests.unit.api.scripted_engine import (
    OneModel,
    ScriptedEngine,
    ended,
    failed,
    finished,
    never,
)
from tests.unit.api.scripted_engine import text as says
from vlm_server.api.app import create_app
from vlm_server.api.http.ended_requests import NUM_KEPT
from vlm_server.platform.log_tail import LogTail
from vlm_server.protocol import CacheStats, MemoryStats, Stats, Usage
from vlm_server.settings import Server, Settings

SECRET = "the-content-of-a-question"
KEYS = '[laptop]\nkey = "laptop-key"\n[ops]\nkey = "operator-key"\nadmin = true\n'
OPERATOR = {"authorization": "Bearer operator-key"}


async def status(client: httpx.AsyncClient) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/v1/status")).json()
    return found


async def ended_requests(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = (await status(client))["requests"]["ended"]
    return listed


async def test_ended_request_is_listed_with_figures_and_without_content(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    assert await ended_requests(client) == []
    engine.script = (says(SECRET), says(SECRET), ended(), finished(Usage(70, 2, 30)))
    answer = await client.post(ROUTE, json=chat(user(text(SECRET), image_part())))
    (listed,) = await ended_requests(client)
    assert listed["id"] == answer.json()["id"]
    assert (listed["route"], listed["dialect"], listed["model"]) == (ROUTE, "openai", "demo")
    assert (listed["status"], listed["finish"], listed["error"]) == (200, "stop", None)
    counts = [listed[name] for name in ("prompt_tokens", "cached_tokens", "tokens", "images")]
    assert counts == [70, 30, 2, 1]
    assert 0 < listed["first_token_seconds"] <= listed["seconds"] < 10
    assert listed["phases"].keys() >= {"receive", "queue", "prefill", "decode"}
    assert SECRET not in str(listed)


async def test_failed_and_refused_requests_are_listed_with_their_errors(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (failed("engine_died", "It died."),)
    await client.post(ROUTE, json=chat())
    await client.post(ROUTE, json=chat() | {"max_tokens": "many"})
    refused, died = await ended_requests(client)
    assert (died["finish"], died["error"], died["status"]) == ("error", "engine_died", 502)
    assert (refused["finish"], refused["status"], refused["model"]) == (None, 400, None)
    assert refused["phases"] == {}


async def test_list_holds_last_requests_for_answers_alone(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (says("a"), ended(), finished())
    for number in range(NUM_KEPT + 3):
        engine.script = (says("a"), ended(), finished(Usage(number, 1)))
        await client.post(ROUTE, json=chat())
    await client.get("/v1/models")
    await client.post("/v1/messages/count_tokens", json={})
    await client.post("/v1/no-such-route", json={})
    listed = await ended_requests(client)
    assert [one["prompt_tokens"] for one in listed] == list(range(NUM_KEPT + 2, 2, -1))


async def test_request_of_client_that_left_is_listed_as_aborted(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (says("a"), never())
    task = asyncio.create_task(client.post(ROUTE, json=chat()))
    await asyncio.wait_for(engine.waiting.wait(), 5)
    assert await ended_requests(client) == []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (listed,) = await ended_requests(client)
    assert listed["finish"] == "abort"


async def test_status_has_percentiles_of_last_answers(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    none = (await status(client))["latencies"]["time_to_first_token_seconds"]
    assert none["percentiles"] is None
    engine.script = (says("a"), says("b"), says("c"), ended(), finished())
    await client.post(ROUTE, json=chat())
    latencies = (await status(client))["latencies"]
    first = latencies["time_to_first_token_seconds"]["percentiles"]
    assert first["count"] == 1
    assert first["p50"] == first["p99"] == first["max"] > 0
    assert latencies["inter_token_latency_seconds"]["percentiles"]["count"] == 2
    assert latencies["e2e_request_latency_seconds"]["percentiles"]["max"] >= first["max"]


async def test_status_divides_memory_of_model_into_parts(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    (model,) = (await status(client))["models"]
    assert model["memory"] is None
    memory = MemoryStats(100, 7, 120, 200, 40, 300, 0, {}, 0.0)
    caches = (
        CacheStats("prefix", 1, 20, 5, 50, 0, 0, 0),
        CacheStats("encoder", 1, 10, 0, 50, 0, 0, 0),
        CacheStats("pixel", 1, 1000, 0, 5000, 0, 0, 0),
    )
    engine.status = replace(engine.status, stats=Stats({}, 0, {}, memory, 0, caches=caches))
    (model,) = (await status(client))["models"]
    parts = dict(model["memory"])
    limit = parts.pop("limit_bytes")
    assert parts == {
        "weights_bytes": 40,
        "kv_bytes": 30,
        "caches_bytes": 30,
        "pool_bytes": 7,
    }
    assert (sum(parts.values()), limit) == (model["memory_bytes"], model["limit_bytes"])


@pytest.fixture
def tail() -> Iterator[LogTail]:
    tail = LogTail()
    tail.setLevel(logging.INFO)
    logging.getLogger().addHandler(tail)
    logging.getLogger("vlm_server").setLevel(logging.INFO)
    yield tail
    logging.getLogger().removeHandler(tail)
    logging.getLogger("vlm_server").setLevel(logging.NOTSET)


async def test_log_is_followed_by_admins_and_shows_no_secrets(
    tmp_path: Path, engine: ScriptedEngine, tail: LogTail
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    file.chmod(0o600)
    settings = Settings(server=Server(api_key_file=str(file)))
    app = create_app(settings, OneModel(engine), parsing_pool(), log_tail=tail)
    engine.script = (says(SECRET), ended(), finished())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
        laptop = {"authorization": "Bearer laptop-key"}
        assert (await client.get("/v1/log", headers=laptop)).status_code == 403
        await client.post(ROUTE, json=chat(user(text(SECRET))), headers=laptop)
        wrong = {"authorization": "Bearer not-a-key"}
        await client.post(f"{ROUTE}?key=in-the-query", json=chat(), headers=wrong)
        shown = await client.get("/v1/log", headers=OPERATOR)
        lines = shown.json()["lines"]
        asked = [line for line in lines if "laptop" in line["text"]]
        assert asked, "who asked, by the name of the key"
        assert {line["level"] for line in asked} == {"info"}
        for secret in (SECRET, "laptop-key", "operator-key", "not-a-key", "in-the-query"):
            assert secret not in shown.text
        last = lines[-1]["number"]
        assert shown.json()["last"] == last
        followed = (await client.get(f"/v1/log?after={last}", headers=OPERATOR)).json()
        assert followed["lines"] == [] or followed["lines"][0]["number"] == last + 1
        for query in ("after=-1", "after=x", "after=²", "after=" + 20 * "9"):
            assert (await client.get(f"/v1/log?{query}", headers=OPERATOR)).status_code == 400


async def test_log_without_lines_is_empty(connect: Connect) -> None:
    assert (await connect(Settings()).get("/v1/log")).json() == {"lines": [], "last": 0}
