"""What Prometheus scrapes: read here with the library's own parser."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.api.conftest import Connect, listening
from tests.unit.api.requests import ROUTE, chat
from tests.unit.api.scripted_engine import HELLO, ScriptedEngine, never
from vlm_server.protocol import CacheStats, MemoryStats, Stats
from vlm_server.settings import Limits, Server, Settings

KEY = "correct-horse-battery"
STATS = Stats(
    requests={"waiting": 1, "preparing": 2, "prefill": 3, "decode": 4},
    tracked=11,
    tracked_by={"scheduler": 5, "runner": 6},
    memory=MemoryStats(100, 200, 300, 400, 50, 600, 700, {"clear_idle": 7, "wait": 8}, 0.5),
    generated_tokens=5000,
    prompt_tokens=7000,
    cached_tokens=600,
    tool_calls=70,
    broken_tool_calls=8,
    caches=(
        CacheStats("pixels", 1, 10, 5, 50, 2, 3, 4),
        CacheStats("prefix", 21, 210, 25, 250, 22, 23, 24, 26),
    ),
)

Sample = tuple[str, tuple[tuple[str, str], ...]]


def sample(name: str, **labels: str) -> Sample:
    return f"vlm_server_{name}", tuple(sorted(labels.items()))


async def scrape(client: httpx.AsyncClient) -> dict[Sample, float]:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {
        (name, tuple(sorted(labels.items()))): value
        for family in text_string_to_metric_families(answer.text)
        for name, labels, value, *_ in family.samples
    }


async def test_what_the_engine_says(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.status = replace(engine.status, stats=STATS, pid=77, restarts=2)
    engine.status = replace(engine.status, quarantined_shapes=8, quarantine_refusals=9)
    found = await scrape(client)
    assert {name: value for name, value in found.items() if "requests_" not in name[0]} == {
        sample("stored_responses"): 0,
        sample("stored_responses_size_bytes"): 0,
        sample("stored_responses_limit_bytes"): Server().responses_store_bytes,
        sample("stored_responses_evictions_total"): 0,
        sample("engine_up"): 1,
        sample("engine_ready"): 1,
        sample("engine_restarts_total"): 2,
        sample("quarantined_shapes"): 8,
        sample("quarantine_refusals_total"): 9,
        sample("engine_requests", state="waiting"): 1,
        sample("engine_requests", state="preparing"): 2,
        sample("engine_requests", state="prefill"): 3,
        sample("engine_requests", state="decode"): 4,
        sample("engine_tracked_requests"): 11,
        sample("memory_active_bytes"): 100,
        sample("memory_pool_bytes"): 200,
        sample("memory_peak_bytes"): 300,
        sample("memory_limit_bytes"): 400,
        sample("memory_baseline_bytes"): 50,
        sample("memory_footprint_bytes"): 600,
        sample("memory_device_used_bytes"): 700,
        sample("memory_decisions_total", kind="clear_idle"): 7,
        sample("memory_decisions_total", kind="wait"): 8,
        sample("memory_clear_seconds_total"): 0.5,
        sample("engine_tracked", who="scheduler"): 5,
        sample("engine_tracked", who="runner"): 6,
        sample("generated_tokens_total"): 5000,
        sample("prompt_tokens_total"): 7000,
        sample("cached_prompt_tokens_total"): 600,
        sample("tool_calls_total"): 70,
        sample("broken_tool_calls_total"): 8,
        sample("cache_entries", cache="pixels"): 1,
        sample("cache_size_bytes", cache="pixels"): 10,
        sample("cache_pinned_bytes", cache="pixels"): 5,
        sample("cache_limit_bytes", cache="pixels"): 50,
        sample("cache_hits_total", cache="pixels"): 2,
        sample("cache_misses_total", cache="pixels"): 3,
        sample("cache_evictions_total", cache="pixels"): 4,
        sample("cache_damaged_total", cache="pixels"): 0,
        sample("cache_entries", cache="prefix"): 21,
        sample("cache_size_bytes", cache="prefix"): 210,
        sample("cache_pinned_bytes", cache="prefix"): 25,
        sample("cache_limit_bytes", cache="prefix"): 250,
        sample("cache_hits_total", cache="prefix"): 22,
        sample("cache_misses_total", cache="prefix"): 23,
        sample("cache_evictions_total", cache="prefix"): 24,
        sample("cache_damaged_total", cache="prefix"): 26,
    }


async def test_an_engine_that_is_gone_says_nothing(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.be("restarting")
    found = await scrape(client)
    assert found[sample("engine_up")] == found[sample("engine_ready")] == 0
    assert found[sample("requests_limit")] == 64
    assert not [name for name, _ in found if "memory" in name or "tokens" in name]


async def test_counters_and_gauges_say_what_they_are(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.status = replace(engine.status, stats=STATS)
    families = list(text_string_to_metric_families((await client.get("/metrics")).text))
    assert all(family.documentation for family in families)
    counters = {family.name for family in families if family.type == "counter"}
    assert {family.type for family in families} == {"counter", "gauge"}
    assert counters == {
        f"vlm_server_{name}"
        for name in ("requests", "engine_restarts", "quarantine_refusals", "generated_tokens",
                     "prompt_tokens", "cached_prompt_tokens", "cache_hits", "cache_misses",
                     "tool_calls", "broken_tool_calls", "stored_responses_evictions",
                     "cache_evictions", "cache_damaged", "memory_decisions", "memory_clear_seconds")
    }  # fmt: skip


async def test_requests_are_counted_by_route_and_status(client: httpx.AsyncClient) -> None:
    for _ in range(2):
        await client.post(ROUTE, json=chat())
    await client.post(ROUTE, json=chat(foo=1))
    await client.put(ROUTE)
    await client.get("/v1/models/demo")
    await client.get("/v1/models/swordfish")
    await client.get("/swordfish")
    await client.get("/v1/models", headers={"host": "evil.example"})
    found = await scrape(client)
    assert {name: value for name, value in found.items() if name[0].endswith("requests_total")} == {
        sample("requests_total", route=ROUTE, status="200"): 2,
        sample("requests_total", route=ROUTE, status="400"): 1,
        sample("requests_total", route=ROUTE, status="405"): 1,
        sample("requests_total", route="/v1/models/{model:path}", status="200"): 1,
        sample("requests_total", route="/v1/models/{model:path}", status="404"): 1,
        sample("requests_total", route="(no route)", status="404"): 1,
        sample("requests_total", route="(no route)", status="403"): 1,
    }
    again = await scrape(client)
    assert again[sample("requests_total", route="/metrics", status="200")] == 1


async def test_a_client_that_leaves_is_counted_as_499() -> None:
    engine = ScriptedEngine(never())
    async with (
        listening(engine) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        with pytest.raises(httpx.ReadTimeout):
            await client.post(ROUTE, json=chat(), timeout=0.2)
        await asyncio.wait_for(engine.closed.wait(), 5)
        gone = sample("requests_total", route=ROUTE, status="499")
        for _ in range(100):
            if gone in (found := await scrape(client)):
                break
            await asyncio.sleep(0.01)
        assert found[gone] == 1


async def test_requests_in_flight(connect: Connect, engine: ScriptedEngine) -> None:
    release = asyncio.Event()
    engine.script = (release, *HELLO)
    client = connect(Settings(limits=Limits(max_requests=2)))
    running = asyncio.create_task(client.post(ROUTE, json=chat()))
    await asyncio.wait_for(engine.waiting.wait(), 5)
    found = await scrape(client)
    assert (found[sample("requests_in_flight")], found[sample("requests_limit")]) == (1, 2)
    release.set()
    await running
    assert (await scrape(client))[sample("requests_in_flight")] == 0


async def test_two_applications_share_no_count(connect: Connect) -> None:
    await connect().get("/v1/models")
    found = await scrape(connect())
    assert not [name for name, _ in found if name.endswith("requests_total")]


async def test_metrics_need_the_key_like_the_status(connect: Connect) -> None:
    client = connect(Settings(server=Server(api_keys=(KEY,))))
    assert (await client.get("/metrics")).status_code == 401
    client.headers["authorization"] = f"Bearer {KEY}"
    assert (await scrape(client))[sample("requests_limit")] == 64
