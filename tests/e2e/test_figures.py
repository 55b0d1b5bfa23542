"""Metrics, log, `Server-Timing` and traces of a real daemon agree with its clients' figures."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.daemons import Daemon, running_daemon, wait_until
from tests.support.images import one_shape, user

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

PHASES = ("receive", "queue", "prepare", "encode", "prefill", "decode")
COLORS = ("green", "blue", "yellow", "purple")
STREAMS = len(COLORS)
TRACE = "0af7651916cd43dd8448eb211c80319c"
Figures = dict[str, float]
Spans = list[tuple[str, str, float]]


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps the trace ids, names and seconds of received spans."""

    spans: Spans

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.spans += [
            (
                span.trace_id.hex(),
                span.name,
                (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
            )
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def spans() -> Spans:
    return []


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, spans: Spans) -> Iterator[Daemon]:
    """A daemon with every figure enabled, vLLM's metric names, and a batch size of one."""
    handler = type("Handler", (Collector,), {"spans": spans})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        settings = (
            f"tracing.endpoint={endpoint}",
            "log.format=json",
            "log.level=debug",
            "metrics.prefix=vllm:",
            "scheduler.max_num_seqs=1",
        )
        arguments = [word for setting in settings for word in ("--set", setting)]
        environment = {"NO_PROXY": "127.0.0.1", "OTEL_BSP_SCHEDULE_DELAY": "100"}
        folder = tmp_path_factory.mktemp("figures")
        with running_daemon(folder, *arguments, environment=environment) as running:
            yield running
        collector.shutdown()


def figures(daemon: Daemon) -> Figures:
    """Metric values by name without prefix; samples with further labels are left out."""
    found = Figures()
    for line in httpx.get(f"{daemon.url}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.endswith('{model_name="demo"}'):
            found[name.removeprefix("vllm:").partition("{")[0]] = float(value)
    return found


def body(color: str, **fields: object) -> dict[str, object]:
    message = user(one_shape("circle", color, (224, 224)), "What colour is it?")
    return {"model": "demo", "messages": [message], "temperature": 0, **fields}


def ask(daemon: Daemon, color: str, **headers: str) -> tuple[dict[str, float], float, str]:
    """(phases in ms, the client's wait in ms, the request's id) of a whole answer."""
    started = time.perf_counter()
    url = f"{daemon.url}/v1/chat/completions"
    answer = httpx.post(url, json=body(color), headers=headers, timeout=60)
    milliseconds = 1e3 * (time.perf_counter() - started)
    entries = (entry.split(";dur=") for entry in answer.headers["server-timing"].split(", "))
    phases = {name: float(value) for name, value in entries}
    return phases, milliseconds, answer.headers["x-request-id"]


def stream(daemon: Daemon, color: str) -> float:
    """The seconds a client waits for the first text of a stream."""
    started = time.perf_counter()
    first = None
    url = f"{daemon.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body(color, stream=True), timeout=60) as answer:
        for line in answer.iter_lines():
            if first is None and '"content":"' in line and '"content":""' not in line:
                first = time.perf_counter() - started
    assert first is not None
    return first


def test_server_timing_phases_add_up_to_clients_wait(daemon: Daemon) -> None:
    before = figures(daemon)
    phases, milliseconds, _ = ask(daemon, "red")
    assert list(phases) == [*PHASES, "total"]
    total = phases.pop("total")
    assert min(phases[name] for name in ("prepare", "encode", "prefill", "decode")) > 0
    assert sum(phases.values()) <= total + 1 <= milliseconds + 1
    assert sum(phases.values()) >= 0.5 * total
    again, _, _ = ask(daemon, "red")
    assert again["encode"] == 0

    def counted() -> bool:  # the engine says it once a second
        return figures(daemon)["mm_cache_queries_total"] == before["mm_cache_queries_total"] + 2

    wait_until(counted, 10, daemon.log)
    after = figures(daemon)
    assert after["mm_cache_hits_total"] == before["mm_cache_hits_total"] + 1
    assert after["prefix_cache_hits_total"] > before["prefix_cache_hits_total"]
    assert after["request_encode_time_seconds_count"] == (
        before["request_encode_time_seconds_count"] + 1
    )
    assert after["request_image_tokens_count"] == before["request_image_tokens_count"] + 2
    assert 0 <= after["kv_cache_usage_perc"] <= 1


@pytest.mark.whole
def test_metrics_under_load_equal_clients_times(daemon: Daemon) -> None:
    """The batch size is one, so the last request waits for all others."""
    before = figures(daemon)
    with ThreadPoolExecutor(STREAMS) as pool:
        client_seconds = list(pool.map(lambda color: stream(daemon, color), COLORS))
    after = figures(daemon)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["time_to_first_token_seconds_count"] == STREAMS
    assert (
        0.5 * sum(client_seconds) <= grown["time_to_first_token_seconds_sum"] <= sum(client_seconds)
    )
    assert grown["request_queue_time_seconds_sum"] > 0
    assert grown["stream_longest_silence_seconds_count"] <= STREAMS
    assert grown["inter_token_latency_seconds_count"] > 0
    parts = sum(
        grown[f"request_{name}_time_seconds_sum"]
        for name in ("queue", "prepare", "encode", "prefill", "decode")
    )
    assert parts <= grown["e2e_request_latency_seconds_sum"]
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0


def log_lines(daemon: Daemon) -> list[dict[str, object]]:
    """The JSON lines of the log, without those printed for the user."""
    lines = daemon.log.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_json_log_has_one_object_per_request(daemon: Daemon) -> None:
    phases, _, request_id = ask(daemon, "green")

    def ours() -> list[dict[str, object]]:
        return [line for line in log_lines(daemon) if line.get("id") == request_id]

    wait_until(ours, 10, daemon.log)
    (line,) = ours()
    assert (line["process"], line["message"], line["status"]) == ("front", "request", 200)
    assert (line["images"], line["finish"], line["error"]) == (1, "stop", None)
    assert isinstance(line["ms"], int)
    assert line["ms"] >= phases["total"] - 1
    assert {entry["process"] for entry in log_lines(daemon)} == {"front", "engine"}


def test_trace_collector_receives_requests_spans(daemon: Daemon, spans: Spans) -> None:
    phases, _, _ = ask(daemon, "blue", traceparent=f"00-{TRACE}-b7ad6b7169203331-01")

    def found() -> dict[str, float]:
        return {name: seconds for trace, name, seconds in spans if trace == TRACE}

    wait_until(lambda: {"chat demo", "decode"} <= found().keys(), 10, daemon.log)
    assert found()["decode"] * 1e3 == pytest.approx(phases["decode"], abs=1)
    assert found()["chat demo"] * 1e3 >= phases["total"] - 1


def test_log_metrics_and_spans_contain_no_prompt(daemon: Daemon, spans: Spans) -> None:
    ask(daemon, "red")
    metrics = httpx.get(f"{daemon.url}/metrics").text
    _, status = daemon.get("/v1/status")
    kept = httpx.get(f"{daemon.url}/v1/log").json()["lines"]
    everything = f"{log_lines(daemon)}{metrics}{spans}{status}{kept}"
    assert {(line["process"], line["model"]) for line in kept} == {("front", "")}
    assert status["requests"]["ended"][0]["images"] == 1
    assert "colour" not in everything
    assert "base64" not in everything
