"""Figures of answers in metrics, log and `Server-Timing`."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tests.unit.api.conftest import Connect, listening, parsing_pool
from tests.unit.api.requests import ROUTE, chat
from tests.unit.api.scripted_engine import (
    HELLO,
    OneModel,
    ScriptedEngine,
    Step,
    ended,
    failed,
    finished,
    never,
    text,
)
from vlm_server.api.app import create_app
from vlm_server.api.http.connection.exchange import RECEIVED_AT
from vlm_server.api.http.connection.server import HttpServer
from vlm_server.protocol import Finished, ImageUse, OnDevice, Phase, Timeline, Usage
from vlm_server.settings import MetricsSettings, Settings

Figures = dict[tuple[str, str], float]
"""By name without the prefix, and the value of the label other than `model_name`."""


async def scrape(client: httpx.AsyncClient, prefix: str = "vlm_server_") -> Figures:
    answer = await client.get("/metrics")
    figures = Figures()
    for family in text_string_to_metric_families(answer.text):
        for name, labels, value, *_ in family.samples:
            assert name.startswith(prefix)
            others = [labels[label] for label in labels if label != "model_name"]
            figures[name.removeprefix(prefix), ",".join(others)] = value
    return figures


async def wait_for_figure(
    client: httpx.AsyncClient, name: str, value: float, label: str = ""
) -> Figures:
    for _ in range(500):
        found = await scrape(client)
        if found[name, label] == value:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} is {found[name, label]}")


def working() -> Step:
    return lambda request_id: OnDevice((request_id,))


def timed(*phases: Phase, images: tuple[ImageUse, ...] = ()) -> Step:
    def end(request_id: str) -> Finished:
        began_at = time.monotonic() - sum(phase.seconds for phase in phases)
        timeline = Timeline(began_at, phases)
        return Finished(request_id, Usage(70, 2, 20), images=images, timeline=timeline)

    return end


async def test_whole_answer_has_server_timing_and_phase_metrics(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    phases = (Phase("queue", 0.0), Phase("prepare", 0.0), Phase("decode", 0.0))
    engine.script = (text("Hello"), ended(), timed(*phases, images=(ImageUse(9, 9, 64),)))
    started = time.perf_counter()
    answer = await client.post(ROUTE, json=chat())
    milliseconds = 1e3 * (time.perf_counter() - started)
    entries = dict(entry.split(";dur=") for entry in answer.headers["server-timing"].split(", "))
    assert list(entries) == [
        *("receive", "queue", "prepare", "encode", "prefill", "decode", "total")
    ]
    total = float(entries.pop("total"))
    assert sum(map(float, entries.values())) <= total + 0.5
    assert 0 < total <= milliseconds
    found = await scrape(client)
    for name, count, value in (
        ("e2e_request_latency_seconds", 1, None),
        ("time_to_first_token_seconds", 1, None),
        ("request_prompt_tokens", 1, 70),
        ("request_generation_tokens", 1, 2),
        ("request_image_tokens", 1, 64),
        ("request_queue_time_seconds", 1, None),
        ("request_encode_time_seconds", 0, 0),
        ("stream_longest_silence_seconds", 0, 0),
    ):
        assert found[f"{name}_count", ""] == count, name
        assert value is None or found[f"{name}_sum", ""] == value, name
    latency = found["e2e_request_latency_seconds_sum", ""]
    assert found["time_to_first_token_seconds_sum", ""] < latency <= milliseconds / 1e3


async def test_stream_has_no_server_timing_header(client: httpx.AsyncClient) -> None:
    answer = await client.post(ROUTE, json=chat(stream=True))
    assert "server-timing" not in answer.headers


async def test_tokenize_is_not_counted_as_answer(client: httpx.AsyncClient) -> None:
    await client.post("/v1/tokenize", json=chat())
    found = await scrape(client)
    assert found["request_success_total", "stop"] == found["num_requests_running", ""] == 0
    assert found["e2e_request_latency_seconds_count", ""] == 0


async def test_finish_reason_counters_start_at_zero(client: httpx.AsyncClient) -> None:
    """Prometheus' `rate` misses the first increase of a counter without an earlier 0."""
    found = await scrape(client)
    ends = {
        label: value for (name, label), value in found.items() if name == "request_success_total"
    }
    assert ends == dict.fromkeys(("stop", "length", "tool_calls", "abort", "error"), 0)


async def test_first_token_and_silence_are_timed_at_socket(
    engine: ScriptedEngine,
) -> None:
    """The front's figures are never larger than those of the client."""
    first, second = asyncio.Event(), asyncio.Event()
    engine.script = (first, text("a"), second, text("b"), ended(), finished())
    async with (
        listening(engine) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        sent_at = time.monotonic()
        asyncio.get_running_loop().call_later(0.2, first.set)
        async with client.stream("POST", ROUTE, json=chat(stream=True)) as answer:
            lines = (
                line
                async for line in answer.aiter_lines()
                if '"content":""' not in line and '"content"' in line
            )
            await anext(lines)
            first_at = time.monotonic()
            asyncio.get_running_loop().call_later(0.3, second.set)
            await anext(lines)
            second_at = time.monotonic()
            async for _ in lines:
                pass
        found = await scrape(client)
    ttft = found["time_to_first_token_seconds_sum", ""]
    gap = found["inter_token_latency_seconds_sum", ""]
    assert 0.1 <= ttft <= first_at - sent_at
    assert 0.3 <= gap <= second_at - sent_at
    assert found["stream_longest_silence_seconds_sum", ""] == gap


async def test_latency_is_measured_from_headers(engine: ScriptedEngine) -> None:
    """The request's task may start much later if the front is busy."""
    app = create_app(Settings(), OneModel(engine), parsing_pool())

    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, RECEIVED_AT: time.monotonic() - 5}, receive, send)

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(late), base_url="http://127.0.0.1:8000"
    ) as client:
        answer = await client.post(ROUTE, json=chat())
        found = await scrape(client)
    assert found["time_to_first_token_seconds_sum", ""] >= 5
    assert found["e2e_request_latency_seconds_sum", ""] >= 5
    receive = answer.headers["server-timing"].partition(",")[0]
    assert float(receive.removeprefix("receive;dur=")) >= 5000


async def test_connection_records_time_of_headers() -> None:
    received = asyncio.Queue[float]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        received.put_nowait(scope[RECEIVED_AT])
        await Response("")(scope, receive, send)

    server = HttpServer(app, Settings())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        started = time.monotonic()
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        await asyncio.sleep(0.1)
        writer.write(b"\r\n")
        received_at = await asyncio.wait_for(received.get(), 10)
        await reader.readline()
        assert started + 0.1 <= received_at <= time.monotonic()
        writer.close()
        server.should_exit = server.force_exit = True
        await serving


async def test_gauges_follow_requests_from_waiting_to_done(engine: ScriptedEngine) -> None:
    begin = asyncio.Event()
    engine.script = (begin, working(), never())
    async with (
        listening(engine) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        asking = [asyncio.create_task(client.post(ROUTE, json=chat())) for _ in range(3)]
        found = await wait_for_figure(client, "num_requests_waiting", 3)
        assert found["num_requests_running", ""] == 0
        assert await loads(client) == (0, 3)
        begin.set()
        found = await wait_for_figure(client, "num_requests_running", 3)
        assert found["num_requests_waiting", ""] == 0
        assert await loads(client) == (3, 0)
        for task in asking:
            task.cancel()
        found = await wait_for_figure(client, "num_requests_running", 0)
        assert found["request_success_total", "abort"] == 3
        assert found["num_requests_waiting", ""] == 0
        assert await loads(client) == (0, 0)


async def loads(client: httpx.AsyncClient) -> tuple[int, int]:
    """The (running, waiting) requests that a gateway reads."""
    (load,) = (await client.get("/v1/loads")).json()["loads"]
    assert load["num_total_reqs"] == load["num_running_reqs"] + load["num_waiting_reqs"]
    return load["num_running_reqs"], load["num_waiting_reqs"]


@pytest.mark.parametrize("stream", [False, True])
async def test_failed_request_is_counted_as_error(
    client: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = (text("a"), failed("engine_died", "it died"))
    await client.post(ROUTE, json=chat(stream=stream))
    found = await scrape(client)
    assert found["request_success_total", "error"] == 1
    assert found["num_requests_running", ""] == found["num_requests_waiting", ""] == 0


async def test_metric_names_have_configured_prefix(connect: Connect) -> None:
    client = connect(Settings(metrics=MetricsSettings(prefix="vllm:")))
    await client.post(ROUTE, json=chat())
    found = await scrape(client, "vllm:")
    assert found["request_success_total", "stop"] == 1


async def test_log_line_has_answers_figures(
    client: httpx.AsyncClient, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.script = (*HELLO[:-1], timed(Phase("queue", 0.0), Phase("decode", 0.0)))
    with caplog.at_level(logging.INFO, "vlm_server.api"):
        await client.post(ROUTE, json=chat(stream=True))
    (record,) = [record for record in caplog.records if record.name == "vlm_server.api"]
    fields = record.__dict__["fields"]
    assert json.loads(json.dumps(fields)) == fields
    assert fields["finish"] == "stop"
    assert (fields["prompt_tokens"], fields["cached_tokens"], fields["tokens"]) == (70, 20, 2)
    assert 0 <= fields["queue_ms"] <= fields["ms"]
    assert 0 <= fields["ttft_ms"] <= fields["ms"]
