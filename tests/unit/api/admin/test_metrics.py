"""`/metrics`, read with Prometheus' own parser."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace as replace_struct
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

import vlm_server
from tests.unit.api.admin.scrapes import full_scrape
from tests.unit.api.conftest import Connect, listening, parsing_pool
from tests.unit.api.requests import ROUTE, chat
from tests.unit.api.scripted_engine import HELLO, OneModel, ScriptedEngine, never
from vlm_server.api.admin.metric_help import HELP
from vlm_server.api.app import create_app
from vlm_server.api.batches.lane import PAUSES
from vlm_server.api.http.model_metrics import KeyUsage
from vlm_server.api.http.tracing import Tracer
from vlm_server.api.routes import OPERATIONS
from vlm_server.protocol import CacheStats, MemoryStats, Stats, Usage
from vlm_server.settings import FileSettings, Limits, Server, Settings
from vlm_server.supervisor.engine_process.client import EngineState

HAS_PROC = Path("/proc/self/stat").exists()
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
    spec_drafts=71,
    spec_draft_tokens=72,
    spec_accepted_tokens=73,
    spec_trained_draft_tokens=74,
    spec_trained_accepted_tokens=75,
    media_items=90,
    cached_media_items=9,
    caches=(
        CacheStats("pixel", 1, 10, 5, 50, 2, 3, 4),
        CacheStats("prefix", 21, 210, 205, 250, 22, 23, 24, 26),
    ),
)

FRONT = tuple(
    f"vlm_server_{name}"
    for name in (
        *("requests_", "request_", "num_requests_", "document", "cached_document_"),
        *("build_", "process_", "key_"),
    )
)
Sample = tuple[str, tuple[tuple[str, str], ...]]


def sample(name: str, **labels: str) -> Sample:
    return f"vlm_server_{name}", tuple(sorted(labels.items()))


def of_model(name: str, **labels: str) -> Sample:
    return sample(name, model_name="demo", **labels)


async def scrape(client: httpx.AsyncClient) -> dict[Sample, float]:
    """All samples but those of histograms."""
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {
        (name, tuple(sorted(labels.items()))): value
        for family in text_string_to_metric_families(answer.text)
        if family.type != "histogram"
        for name, labels, value, *_ in family.samples
    }


ENGINE_METRICS: dict[str, dict[Sample, float]] = {
    "stored responses": {
        sample("stored_responses"): 0,
        sample("stored_responses_size_bytes"): 0,
        sample("stored_responses_limit_bytes"): Server().max_responses_bytes,
        sample("stored_responses_evictions_total"): 0,
        sample("stored_files"): 0,
        sample("stored_files_size_bytes"): 0,
        sample("stored_files_limit_bytes"): FileSettings().max_bytes,
        sample("stored_files_evictions_total"): 0,
        sample("batches_active"): 0,
        **{sample("batches_paused", reason=reason): 0 for reason in PAUSES},
        sample("batch_lines_running"): 0,
        sample("batch_lines_total", end="completed"): 0,
        sample("batch_lines_total", end="failed"): 0,
        sample("batch_lines_total", end="interrupted"): 0,
    },
    "resumable streams": {
        sample("resumable_streams"): 0,
        sample("resumable_streams_size_bytes"): 0,
        sample("resumable_streams_limit_bytes"): Server().max_stream_resume_bytes,
        sample("resumed_streams_total"): 0,
        sample("abandoned_streams_total"): 0,
    },
    "watches": {
        sample("watches"): 0,
        sample("watches_size_bytes"): 0,
        sample("watch_answers_total"): 0,
        sample("watch_device_seconds_total"): 0,
        **{
            sample("watch_frames_total", fate=fate): 0
            for fate in ("asked", "unchanged", "skipped", "failed")
        },
    },
    "engine process": {
        of_model("engine_up"): 1,
        of_model("engine_ready"): 1,
        of_model("model_load_failed"): 0,
        of_model("engine_restarts_total"): 2,
        of_model("quarantined_shapes"): 8,
        of_model("quarantine_refusals_total"): 9,
        of_model("engine_requests", state="waiting"): 1,
        of_model("engine_requests", state="preparing"): 2,
        of_model("engine_requests", state="prefill"): 3,
        of_model("engine_requests", state="decode"): 4,
        of_model("engine_tracked_requests"): 11,
        of_model("engine_tracked", who="scheduler"): 5,
        of_model("engine_tracked", who="runner"): 6,
    },
    "memory": {
        of_model("memory_active_bytes"): 100,
        of_model("memory_pool_bytes"): 200,
        of_model("memory_peak_bytes"): 300,
        of_model("memory_limit_bytes"): 400,
        of_model("memory_baseline_bytes"): 50,
        of_model("memory_footprint_bytes"): 600,
        of_model("memory_device_used_bytes"): 700,
        of_model("memory_decisions_total", kind="clear_idle"): 7,
        of_model("memory_decisions_total", kind="wait"): 8,
        of_model("memory_clear_seconds_total"): 0.5,
    },
    "tokens": {
        of_model("generation_tokens_total"): 5000,
        of_model("prompt_tokens_total"): 7000,
        of_model("prefix_cache_queries_total"): 7000,
        of_model("prefix_cache_hits_total"): 600,
        of_model("mm_cache_queries_total"): 90,
        of_model("mm_cache_hits_total"): 9,
        of_model("kv_cache_usage_perc"): 45 / 350,
        of_model("tool_calls_total"): 70,
        of_model("broken_tool_calls_total"): 8,
        of_model("spec_decode_num_drafts_total"): 71,
        of_model("spec_decode_num_draft_tokens_total"): 72,
        of_model("spec_decode_num_accepted_tokens_total"): 73,
        of_model("spec_decode_num_trained_draft_tokens_total"): 74,
        of_model("spec_decode_num_trained_accepted_tokens_total"): 75,
    },
    "caches": {
        of_model("cache_entries", cache="pixel"): 1,
        of_model("cache_size_bytes", cache="pixel"): 10,
        of_model("cache_pinned_bytes", cache="pixel"): 5,
        of_model("cache_limit_bytes", cache="pixel"): 50,
        of_model("cache_hits_total", cache="pixel"): 2,
        of_model("cache_misses_total", cache="pixel"): 3,
        of_model("cache_evictions_total", cache="pixel"): 4,
        of_model("cache_damaged_total", cache="pixel"): 0,
        of_model("cache_entries", cache="prefix"): 21,
        of_model("cache_size_bytes", cache="prefix"): 210,
        of_model("cache_pinned_bytes", cache="prefix"): 205,
        of_model("cache_limit_bytes", cache="prefix"): 250,
        of_model("cache_hits_total", cache="prefix"): 22,
        of_model("cache_misses_total", cache="prefix"): 23,
        of_model("cache_evictions_total", cache="prefix"): 24,
        of_model("cache_damaged_total", cache="prefix"): 26,
    },
}
"""The metrics of an engine with `STATS`, by what they are about."""


@pytest.fixture
async def engine_metrics(client: httpx.AsyncClient, engine: ScriptedEngine) -> dict[Sample, float]:
    """A scrape of an engine with `STATS`, without the front's own metrics."""
    engine.status = replace(engine.status, stats=STATS, pid=77, restarts=2)
    engine.status = replace(engine.status, quarantined_shapes=8, quarantine_refusals=9)
    scraped = await scrape(client)
    return {key: value for key, value in scraped.items() if not key[0].startswith(FRONT)}


@pytest.mark.parametrize("group", ENGINE_METRICS)
async def test_metrics_report_engine_figures(
    engine_metrics: dict[Sample, float], group: str
) -> None:
    expected = ENGINE_METRICS[group]
    assert {key: engine_metrics.get(key) for key in expected} == expected


async def test_metrics_contain_exactly_listed_engine_figures(
    engine_metrics: dict[Sample, float],
) -> None:
    assert set(engine_metrics) == {key for group in ENGINE_METRICS.values() for key in group}


async def test_metrics_omit_figures_of_restarting_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.be("restarting")
    found = await scrape(client)
    assert found[of_model("engine_up")] == found[of_model("engine_ready")] == 0
    assert found[sample("requests_limit")] == 64
    ours = [name for name, _ in found if not name.startswith(FRONT)]
    assert not [name for name in ours if "memory" in name or name.endswith("tokens_total")]


@pytest.mark.parametrize(
    ("state", "error", "expected"),
    [("failed", "", 1), ("unloaded", "no room", 1), ("unloaded", "", 0), ("starting", "", 0)],
)
async def test_metrics_tell_models_whose_load_failed(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    state: EngineState,
    error: str,
    expected: int,
) -> None:
    engine.status = replace(engine.status, state=state, error=error)
    assert (await scrape(client))[of_model("model_load_failed")] == expected


async def test_metrics_have_documentation_and_right_types(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.status = replace(engine.status, stats=STATS)
    families = list(text_string_to_metric_families((await client.get("/metrics")).text))
    assert all(family.documentation for family in families)
    counters = {family.name for family in families if family.type == "counter"}
    assert {family.type for family in families} == {"counter", "gauge", "histogram"}
    assert counters == {
        f"vlm_server_{name}"
        for name in ("requests", "request_success", "engine_restarts", "quarantine_refusals",
                     "generation_tokens", "prompt_tokens", "prefix_cache_queries",
                     "prefix_cache_hits", "mm_cache_queries", "mm_cache_hits", "cache_hits",
                     "cache_misses", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
                     "spec_decode_num_accepted_tokens", "spec_decode_num_trained_draft_tokens",
                     "spec_decode_num_trained_accepted_tokens",
                     "tool_calls", "broken_tool_calls", "stored_responses_evictions",
                     "stored_files_evictions", "batch_lines",
                     "watch_frames", "watch_answers", "watch_device_seconds",
                     "resumed_streams", "abandoned_streams",
                     "documents", "document_pages",
                     "cached_document_pages", "document_draw_seconds", "cache_evictions",
                     "cache_damaged", "memory_decisions", "memory_clear_seconds",
                     "key_prompt_tokens", "key_generation_tokens",
                     *(["process_cpu_seconds"] if HAS_PROC else []))
    }  # fmt: skip


async def test_every_help_text_belongs_to_metric(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    scraped = text_string_to_metric_families(await full_scrape(client, engine))
    names = {family.name.removeprefix("vlm_server_").removesuffix("_info") for family in scraped}
    assert {name for name in HELP if HAS_PROC or not name.startswith("process_")} == names


@pytest.mark.parametrize("name", HELP)
def test_help_text_is_sentence_with_unit(name: str) -> None:
    assert re.fullmatch(r"(?!Its |Their |Of these|These )[A-Z1].*\.", HELP[name])
    for unit in ("seconds", "bytes", "tokens"):
        if re.search(rf"_{unit}($|_limit)", name):
            assert unit in HELP[name].lower()


async def test_metrics_omit_device_memory_without_driver(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    memory = replace_struct(STATS.memory, device_used_bytes=0)
    engine.status = replace(engine.status, stats=replace_struct(STATS, memory=memory))
    found = await scrape(client)
    assert of_model("memory_footprint_bytes") in found
    assert of_model("memory_device_used_bytes") not in found


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


async def test_disconnected_client_is_counted_as_499() -> None:
    engine = ScriptedEngine(never())
    async with (
        listening(engine) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        asking = asyncio.create_task(client.post(ROUTE, json=chat()))
        await asyncio.wait_for(engine.waiting.wait(), 5)
        asking.cancel()
        await asyncio.wait_for(engine.closed.wait(), 5)
        gone = sample("requests_total", route=ROUTE, status="499")
        for _ in range(100):
            if gone in (found := await scrape(client)):
                break
            await asyncio.sleep(0.01)
        assert found[gone] == 1


async def test_metrics_count_requests_in_flight(connect: Connect, engine: ScriptedEngine) -> None:
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


async def test_metrics_of_two_applications_are_independent(connect: Connect) -> None:
    await connect().get("/v1/models")
    found = await scrape(connect())
    assert not [name for name, _ in found if name.endswith("requests_total")]


async def test_metrics_need_key_like_status(connect: Connect) -> None:
    client = connect(Settings(server=Server(api_keys=(KEY,))))
    assert (await client.get("/metrics")).status_code == 401
    client.headers["authorization"] = f"Bearer {KEY}"
    assert (await scrape(client))[sample("requests_limit")] == 64


@pytest.mark.skipif(not HAS_PROC, reason="needs Linux's /proc")
async def test_process_metrics_describe_front_and_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.status = replace(engine.status, pid=os.getppid())
    found = await scrape(client)
    for process, model in (("front", ""), ("engine", "demo")):
        labels = {"process": process, "model_name": model}
        assert found[sample("process_resident_memory_bytes", **labels)] > 1e6
        assert 0 < found[sample("process_start_time_seconds", **labels)] <= time.time()
        assert found[sample("process_open_fds", **labels)] > 0
        assert sample("process_cpu_seconds_total", **labels) in found
    engine.status = replace(engine.status, pid=None)
    gone = await scrape(client)
    assert not [labels for _, labels in gone if ("process", "engine") in labels]


async def test_build_info_names_versions(client: httpx.AsyncClient) -> None:
    (labels,) = [dict(labels) for name, labels in await scrape(client) if "build_info" in name]
    assert labels["version"] == vlm_server.__version__
    assert labels["mlx"] == importlib.metadata.version("mlx")
    status = (await client.get("/v1/status")).json()
    assert status["version"] == labels["version"]
    assert 0 <= status["time"] - status["started_at"] < 600


async def test_tokens_are_counted_by_key_name_and_model(connect: Connect, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[ann]\nkey = "{KEY}"\nadmin = true\n')
    path.chmod(0o600)
    client = connect(Settings(server=Server(api_key_file=str(path))))
    client.headers["X-Api-Key"] = KEY
    for _ in range(2):
        answer = (await client.post(ROUTE, json=chat())).json()
    text = (await client.get("/metrics")).text
    assert KEY not in text
    found = await scrape(client)
    labels = {"key": "ann", "model_name": "demo"}
    usage = answer["usage"]
    assert found[sample("key_prompt_tokens_total", **labels)] == 2 * usage["prompt_tokens"]
    assert found[sample("key_generation_tokens_total", **labels)] == 2 * usage["completion_tokens"]


def test_key_usage_is_bounded_and_never_falls() -> None:
    usage = KeyUsage(max_keys=2)
    for name in ("a", "b", "c", "d", "a", None):
        usage.add(name, "demo", Usage(3, 4))
    usage.add("a", "demo", Usage(0, 0))
    assert sorted(usage) == [("(other)", "demo", 9, 12), ("a", "demo", 6, 8), ("b", "demo", 3, 4)]


async def test_openmetrics_has_exemplars_and_text_format_has_none(engine: ScriptedEngine) -> None:
    tracer = Tracer(TracerProvider(shutdown_on_exit=False), OPERATIONS)
    app = create_app(Settings(), OneModel(engine), parsing_pool(), tracer)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000")
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    traced = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    await client.post(ROUTE, json=chat(stream=True), headers=traced)
    await client.post(ROUTE, json=chat(), headers={"traceparent": traced["traceparent"][:-1] + "0"})
    answer = await client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    exemplars = {
        family.name: sample.exemplar.labels
        for family in openmetrics.text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.exemplar
    }
    names = ("time_to_first_token_seconds", "e2e_request_latency_seconds")
    assert exemplars == {f"vlm_server_{name}": {"trace_id": trace_id} for name in names}
    assert trace_id not in (await client.get("/metrics")).text
