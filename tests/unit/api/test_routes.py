"""Models, health, version, status, and errors of unknown routes and methods."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.unit.api.conftest import Connect
from tests.unit.api.requests import ROUTE, chat, image_part, text, user
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server import __version__
from vlm_server.protocol import CacheStats, MemoryStats, ModelFacts, Stats
from vlm_server.settings import ImageSettings, ModelSettings, Server, Settings


async def test_model_list_and_model_are_equal(client: httpx.AsyncClient) -> None:
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("demo", "model", "vlm_server")
    assert (await client.get("/v1/models/demo")).json() == model
    assert (await client.get("/v1/models/default")).json() == model


@pytest.mark.parametrize(
    ("route", "headers", "num_lines"),
    [
        ("/v1/models", {}, 1),
        ("/v1/models", {"X-VLM-Look": "1"}, 0),
        ("/v1/models/unknown", {"X-VLM-Look": "1"}, 1),
    ],
)
async def test_looks_for_news_are_logged_only_if_they_fail(
    client: httpx.AsyncClient,
    caplog: pytest.LogCaptureFixture,
    route: str,
    headers: dict[str, str],
    num_lines: int,
) -> None:
    with caplog.at_level(logging.INFO, "vlm_server.api"):
        await client.get(route, headers=headers)
    assert len(caplog.records) == num_lines


async def test_answered_question_is_logged_though_client_only_looks(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vlm_server.api"):
        await client.post(ROUTE, json=chat(user("Hi")), headers={"X-VLM-Look": "1"})
    assert len(caplog.records) == 1


async def test_model_name_may_contain_slash(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.status = replace(engine.status, model_name="org/model-3b")
    assert (await client.get("/v1/models/org/model-3b")).json()["id"] == "org/model-3b"


@pytest.mark.parametrize("route", ["/v1/models", "/api/v0/models"])
async def test_model_route_accepts_aliases(connect: Connect, route: str) -> None:
    client = connect(Settings(model=ModelSettings(aliases=("gpt-*",))))
    assert (await client.get(f"{route}/gpt-4o")).json()["id"] == "demo"
    assert (await client.get(f"{route}/claude")).status_code == 404


FACTS = ModelFacts(
    family="qwen3_vl",
    num_parameters=3_000_000_000,
    size_bytes=2_000_000_000,
    quantization="4bit",
    digest="ab" * 32,
    modified_at=1_700_000_000.5,
    capabilities=("completion", "vision", "video", "tools"),
    context_tokens=32768,
    min_image_pixels=4096,
    max_image_pixels=1_000_000,
    image_side_multiple=32,
    coordinates="thousandths",
)


async def test_model_route_shows_models_facts(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.status = replace(engine.status, model_facts=FACTS)
    limits = Settings().limits
    assert (await client.get("/v1/models/demo")).json() == {
        "id": "demo",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "vlm_server",
        "root": "demo",
        "parent": None,
        "state": "ready",
        "family": "qwen3_vl",
        "max_model_len": 32768,
        "num_parameters": 3_000_000_000,
        "quantization": "4bit",
        "modalities": {"input": ["text", "image", "video"], "output": ["text"]},
        "capabilities": ["completion", "vision", "video", "tools"],
        "coordinates": "thousandths",
        "image_limits": {
            "max_images": limits.max_images,
            "max_image_bytes": limits.max_image_bytes,
            "max_image_pixels": limits.max_image_pixels,
            "formats": ["png", "jpeg", "webp", "gif", "avif", "bmp", "tiff", "heic"],
            "seen": {"min_pixels": 4096, "max_pixels": 1_000_000, "side_multiple": 32},
        },
    }


async def test_image_limits_follow_pixel_setting(connect: Connect, engine: ScriptedEngine) -> None:
    client = connect(Settings(image=ImageSettings(max_pixels=500_000)))
    engine.status = replace(engine.status, model_facts=FACTS)
    limits = (await client.get("/v1/models/demo")).json()["image_limits"]
    assert limits["seen"]["max_pixels"] == 500_000
    engine.status = replace(engine.status, model_facts=ModelFacts(family="gemma3"))
    limits = (await client.get("/v1/models/demo")).json()["image_limits"]
    assert limits["seen"] is None


async def test_lm_studio_path_answers_chat(client: httpx.AsyncClient) -> None:
    answer = await client.post("/api/v0/chat/completions", json=chat())
    assert answer.json()["choices"][0]["message"]["content"] == "Hello world"


async def test_lm_studio_model_list_has_its_shape(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    (unknown,) = (await client.get("/api/v0/models")).json()["data"]
    assert (unknown["id"], unknown["capabilities"]) == ("demo", [])
    engine.status = replace(engine.status, model_facts=FACTS)
    (model,) = (await client.get("/api/v0/models")).json()["data"]
    assert model == (await client.get("/api/v0/models/demo")).json()
    assert model == {
        "id": "demo",
        "object": "model",
        "type": "vlm",
        "publisher": "vlm_server",
        "arch": "qwen3_vl",
        "compatibility_type": "mlx",
        "quantization": "4bit",
        "state": "loaded",
        "max_context_length": 32768,
        "loaded_context_length": 32768,
        "capabilities": ["tool_use"],
    }
    engine.be("restarting")
    assert (await client.get("/api/v0/models/demo")).json()["state"] == "not-loaded"
    assert (await client.get("/api/v0/models/gpt-4o")).status_code == 404


@pytest.mark.parametrize("route", ["/health", "/healthz", "/ping"])
async def test_health_probes_need_no_key_and_follow_readiness(
    connect: Connect, engine: ScriptedEngine, route: str
) -> None:
    client = connect(Settings(server=Server(api_keys=("a secret key",))))
    assert (await client.get(route)).status_code == 200, "without a key"
    engine.be("restarting")
    assert (await client.get(route)).status_code == 503


async def test_model_route_of_unknown_model_is_404(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models/gpt-4o")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "gpt-4o" not in answer.text


async def test_health_routes_report_live_and_ready(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health/live")).json() == {"status": "live"}
    answer = await client.get("/health/ready")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready", "progress": None})


async def test_version_route_reports_version(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": __version__}


@pytest.mark.parametrize("path", ["", "/conv_1", "/conv_1/items"])
async def test_conversations_routes_are_501_with_alternative(
    client: httpx.AsyncClient, path: str
) -> None:
    answer = await client.post(f"/v1/conversations{path}", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_supported")
    assert "previous_response_id" in answer.json()["error"]["message"]


async def test_ready_and_models_show_model_warnings(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    facts = ModelFacts("qwen3_vl", warnings=("it has no chat template",))
    engine.status = replace(engine.status, model_facts=facts)
    ready = (await client.get("/health/ready")).json()
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert ready["warnings"] == model["warnings"] == ["it has no chat template"]


@pytest.mark.parametrize("state", ["loading", "restarting", "draining", "failed"])
async def test_restarting_engine_is_not_ready_but_live(
    client: httpx.AsyncClient, engine: ScriptedEngine, state: str
) -> None:
    engine.be(state, retry_after_seconds=4.2)
    engine.status = replace(engine.status, progress=("weights", 0.5))
    answer = await client.get("/health/ready")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert answer.json() == {"status": state, "progress": {"stage": "weights", "fraction": 0.5}}
    assert (await client.get("/health/live")).status_code == 200
    answer = await client.post(ROUTE, json=chat())
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert answer.json()["error"]["code"] == "engine_unavailable"
    assert engine.submitted == []


STATS = Stats(
    {"prefill": 3, "decode": 4},
    10,
    {"runner": 10},
    MemoryStats(100, 200, 300, 400, 50, 600, 700, {"clear_idle": 7}, 0.5),
    5000,
    7000,
    600,
    (CacheStats("prefix", 1, 10, 5, 50, 2, 3, 4),),
    {"encoder": 5},
    70,
    8,
    90,
    9,
    max_num_seqs=12,
)


async def status_of(client: httpx.AsyncClient, engine: ScriptedEngine) -> dict[str, Any]:
    """The status route's answer for an engine with `STATS`."""
    engine.status = replace(engine.status, stats=STATS, pid=77, restarts=2)
    engine.status = replace(engine.status, quarantined_shapes=8, quarantine_refusals=9)
    body: dict[str, Any] = (await client.get("/v1/status")).json()
    return body


async def test_status_reports_requests_and_limits_of_front(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    requests = (await status_of(client, engine))["requests"]
    assert requests.pop("waiting_bytes_limit") >= 4 * Settings().limits.max_body_bytes
    assert requests == {
        "in_flight": 0,
        "limit": 64,
        "waiting_bytes": 0,
        "list": [],
        "ended": [],
    }


async def test_status_reports_engine_process_and_quarantine(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    reported = (await status_of(client, engine))["engine"]
    assert reported["quarantine"] == {"shapes": 8, "refusals": 9}
    assert (reported["pid"], reported["restarts"]) == (77, 2)


async def test_status_reports_engine_requests_tokens_and_work(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    stats = (await status_of(client, engine))["engine"]["stats"]
    del stats["memory"], stats["caches"]  # see below
    assert stats == {
        "requests": {"prefill": 3, "decode": 4},
        "tracked": 10,
        "tracked_by": {"runner": 10},
        "generated_tokens": 5000,
        "prompt_tokens": 7000,
        "cached_tokens": 600,
        "tool_calls": 70,
        "broken_tool_calls": 8,
        "spec_drafts": 0,
        "spec_draft_tokens": 0,
        "spec_accepted_tokens": 0,
        "spec_trained_draft_tokens": 0,
        "spec_trained_accepted_tokens": 0,
        "max_num_seqs": 12,
        "media_items": 90,
        "cached_media_items": 9,
        "at_work": {"encoder": 5},
    }


async def test_status_reports_device_memory_and_governor_decisions(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    assert (await status_of(client, engine))["engine"]["stats"]["memory"] == {
        "active_bytes": 100,
        "pool_bytes": 200,
        "peak_bytes": 300,
        "limit_bytes": 400,
        "baseline_bytes": 50,
        "footprint_bytes": 600,
        "device_used_bytes": 700,
        "decisions": {"clear_idle": 7},
        "clear_seconds": 0.5,
        "reserved_bytes": 0,
    }


async def test_status_reports_size_and_hits_of_each_cache(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    assert (await status_of(client, engine))["engine"]["stats"]["caches"] == [
        {
            "name": "prefix",
            "entries": 1,
            "size_bytes": 10,
            "pinned_bytes": 5,
            "limit_bytes": 50,
            "hits": 2,
            "misses": 3,
            "evictions": 4,
            "damaged": 0,
        }
    ]


async def test_text_page_contains_curl_request(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in answer.text


@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v1/", "/v1/chat/completions/", "/health/x"])
async def test_unknown_routes_are_404_in_openais_shape(
    client: httpx.AsyncClient, path: str
) -> None:
    answer = await client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("/chat/completions", "`POST /v1/chat/completions`"),
        ("/v1/v1/chat/completions", "`POST /v1/chat/completions`"),
        ("/v1/chat/completion", "`POST /v1/chat/completions`"),
        ("/models", "`GET /v1/models`"),
        ("/openai/v1/chat/completions", "`POST /v1/chat/completions`"),
        ("/v1/health", "`GET /health`"),
        ("/ready", "`GET /health/ready`"),
        ("/v1/complete", "`POST /v1/completions`"),
    ],
)
async def test_unknown_path_error_names_nearest_route(
    client: httpx.AsyncClient, path: str, nearest: str
) -> None:
    message = (await client.get(path)).json()["error"]["message"]
    assert message.startswith(f"There is no route `{path}`. Do you mean {nearest}?")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/moderations", "/v1", "//"])
async def test_unknown_path_error_suggests_no_unrelated_route(
    client: httpx.AsyncClient, path: str
) -> None:
    assert "Do you mean" not in (await client.get(path)).text


async def test_wrong_method_error_names_methods(client: httpx.AsyncClient) -> None:
    answer = await client.get(ROUTE)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "GET is not allowed on this route, which takes POST." in answer.text


async def test_unknown_path_error_is_short_and_printable(client: httpx.AsyncClient) -> None:
    message = (await client.get("/%0a`%00" + "x" * 5000)).json()["error"]["message"]
    assert message.isprintable()
    assert len(message) < 250
    assert "Do you mean" not in message


async def test_foreign_host_error_names_setting(client: httpx.AsyncClient) -> None:
    answer = await client.get("/", headers={"Host": "host.docker.internal:8000"})
    assert answer.status_code == 403
    message = answer.json()["error"]["message"]
    assert "`host.docker.internal`" in message
    assert "server.allowed_hosts" in message


@pytest.mark.parametrize(
    ("method", "path"), [("GET", ROUTE), ("PUT", ROUTE), ("POST", "/v1/models"), ("DELETE", "/")]
)
async def test_wrong_methods_are_405_in_openais_shape(
    client: httpx.AsyncClient, method: str, path: str
) -> None:
    answer = await client.request(method, path)
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"
    assert answer.headers["allow"]


async def test_every_response_has_its_own_request_id(client: httpx.AsyncClient) -> None:
    paths = ["/health/live", "/v1/models", "/nowhere", "/"]
    ids = {(await client.get(path)).headers["x-request-id"] for path in paths}
    assert len(ids) == len(paths)


async def test_request_is_logged_in_one_line_without_payload(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vlm_server.api"):
        answer = await client.post(ROUTE, json=chat(user(text("swordfish"), image_part())))
        await client.get("/nowhere/swordfish%0aforged")
        for path in ("/health/live", "/metrics", "/v1/status"):
            await client.get(path)
    ours = [record.getMessage() for record in caplog.records if record.name == "vlm_server.api"]
    assert len(ours) == 2
    assert f"id={answer.headers['x-request-id']} status=200" in ours[0]
    assert "tokens=2 images=1 videos=0 documents=0 pages=0 error=-" in ours[0]
    assert "ttft_ms=-" not in ours[0]
    assert "status=404" in ours[1]
    assert "error=not_found" in ours[1]
    assert "swordfish" not in caplog.text
