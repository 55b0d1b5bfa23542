"""Spans of real requests, exported to memory and to a collector on a socket."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route

from tests.unit.api.conftest import parsing_pool
from tests.unit.api.requests import ROUTE, chat, image_part, text, user
from tests.unit.api.scripted_engine import HELLO, OneModel, ScriptedEngine, failed
from tests.unit.api.scripted_engine import text as says
from vlm_server.api.app import create_app
from vlm_server.api.http import tracing
from vlm_server.api.http.tracing import Tracer, start_tracer
from vlm_server.api.routes import BODIES, OPERATIONS
from vlm_server.errors import ConfigError
from vlm_server.protocol import Finished, Phase, Timeline, Usage
from vlm_server.settings import Settings, Tracing

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

OPERATIONS_DOCS = (Path(__file__).parents[4] / "docs" / "operations.md").read_text("utf-8")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PHASES = (Phase("queue", 0.0), Phase("prepare", 0.0), Phase("prefill", 0.0), Phase("decode", 0.0))


def timed(request_id: str) -> Finished:
    return Finished(request_id, Usage(70, 2, 20), timeline=Timeline(time.monotonic(), PHASES))


@dataclass
class Traced:
    """A client of an application that exports its spans to memory."""

    engine: ScriptedEngine = field(default_factory=lambda: ScriptedEngine(*HELLO[:-1], timed))
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        tracer = Tracer(provider, OPERATIONS)
        app = create_app(Settings(), OneModel(self.engine), parsing_pool(), tracer)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000"
        )

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


SECRET = "swordfish"


@pytest.mark.parametrize("stream", [False, True])
async def test_request_span_has_documented_attributes(stream: bool) -> None:
    traced = Traced()
    body = chat(user(text(SECRET), image_part()), stream=stream)
    answer = await traced.client.post(ROUTE, json=body)
    span = traced.spans["chat demo"]
    attributes = dict(span.attributes or {})
    assert [name for name in attributes if f"`{name}`" not in OPERATIONS_DOCS] == []
    assert attributes.pop("gen_ai.response.time_to_first_chunk") > 0  # type: ignore[operator]
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vlm_server",
        "gen_ai.request.model": "demo",
        "gen_ai.request.stream": stream,
        "gen_ai.response.model": "demo",
        "gen_ai.response.id": f"chatcmpl-{answer.headers['x-request-id']}",
        "vlm_server.request_id": answer.headers["x-request-id"],
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 70,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 20,
        "http.route": ROUTE,
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "vlm_server.images": 1,
        "vlm_server.videos": 0,
        "vlm_server.pages": 0,
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_phases_are_child_spans_within_request_span(stream: bool) -> None:
    traced = Traced()
    before = time.time_ns()
    await traced.client.post(ROUTE, json=chat(user(text(SECRET), image_part()), stream=stream))
    after = time.time_ns()
    spans = traced.spans
    span = spans.pop("chat demo")
    assert list(spans) == ["receive", "queue", "prepare", "prefill", "decode"]
    assert span.context is not None
    slack = 10_000_000  # two clocks
    for child in spans.values():
        assert child.parent == span.context
        assert before - slack <= span.start_time <= child.start_time <= child.end_time  # type: ignore[operator]
        assert child.end_time <= span.end_time <= after + slack  # type: ignore[operator]


@pytest.mark.parametrize("stream", [False, True])
async def test_spans_contain_neither_prompt_nor_answer(stream: bool) -> None:
    traced = Traced()
    await traced.client.post(ROUTE, json=chat(user(text(SECRET), image_part()), stream=stream))
    exported = "".join(span.to_json() for span in traced.exporter.get_finished_spans())
    assert "chat demo" in exported
    assert SECRET not in exported
    assert "Hello" not in exported


async def test_request_span_joins_callers_trace() -> None:
    traced = Traced()
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b"}
    await traced.client.post(ROUTE, json=chat(), headers=headers)
    spans = traced.exporter.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context} == {TRACE}
    parent = traced.spans["chat demo"].parent
    assert parent is not None
    assert f"{parent.span_id:016x}" == PARENT
    assert parent.trace_state.get("a") == "b"


async def test_unsampled_callers_get_no_span() -> None:
    traced = Traced()
    await traced.client.post(ROUTE, json=chat(), headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    assert not traced.spans


@pytest.mark.parametrize(
    "value", ["", "swordfish", f"00-{'0' * 32}-{PARENT}-01", "é" * 9, "-" * 999]
)
async def test_invalid_traceparent_begins_new_trace(value: str) -> None:
    traced = Traced()
    headers = [(b"traceparent", value.encode("latin-1"))]
    answer = await traced.client.post(ROUTE, json=chat(), headers=headers)
    assert answer.status_code == 200
    assert traced.spans["chat demo"].parent is None


async def test_failed_request_span_has_error_code() -> None:
    traced = Traced()
    await traced.client.post(ROUTE, json=chat(foo=1))
    traced.engine.script = (says("a"), failed("engine_died", "swordfish"))
    await traced.client.post(ROUTE, json=chat(stream=True))
    refused, died = traced.spans["chat"], traced.spans["chat demo"]
    assert (refused.attributes or {})["error.type"] == "unsupported_parameter"
    assert (died.attributes or {})["error.type"] == "engine_died"
    assert not refused.status.is_ok
    assert not died.status.is_ok


async def test_routes_without_generation_have_no_spans() -> None:
    traced = Traced()
    for path in ("/metrics", "/v1/models", "/health/live", "/nowhere"):
        await traced.client.get(path)
    await traced.client.post("/v1/tokenize", json=chat())
    await traced.client.get(ROUTE)
    assert not traced.spans


def test_every_generating_route_is_traced() -> None:
    paths = [route.path for route in create_app(Settings(), OneModel(ScriptedEngine())).routes
             if isinstance(route, Route)]  # fmt: skip
    assert set(OPERATIONS) <= set(paths)
    others = (
        "tokenize", "count_tokens", "input_tokens", "/show", "/pull", "/load", "/unload", "/clear",
        "/cancel", "/files", "/media", "/documents/pages", "/batches", "/watch", "/frames"
    )  # fmt: skip
    assert {path for path in BODIES if not path.endswith(others)} - set(OPERATIONS) == set()


class Collector(http.server.BaseHTTPRequestHandler):
    bodies: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.bodies.append((self.path, body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    bodies: list[tuple[str, bytes]] = []
    handler = type("Handler", (Collector,), {"bodies": bodies})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", bodies
        server.shutdown()


@pytest.mark.parametrize("path", ["/v1/traces", "", "/", None])
async def test_otlp_collector_receives_spans(
    collector: tuple[str, list[tuple[str, bytes]]],
    monkeypatch: pytest.MonkeyPatch,
    path: str | None,
) -> None:
    """`path` None: the endpoint comes from the environment."""
    url, bodies = collector
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    if path is None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    tracer = start_tracer(Tracing("" if path is None else f"{url}{path}"), OPERATIONS)
    assert tracer is not None
    app = create_app(
        Settings(), OneModel(ScriptedEngine(*HELLO[:-1], timed)), parsing_pool(), tracer
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        await client.post(ROUTE, json=chat())
    tracer.close()
    ((requested_path, body),) = bodies
    assert requested_path == "/v1/traces"
    (sent,) = ExportTraceServiceRequest.FromString(body).resource_spans
    resource = {
        attribute.key: attribute.value.string_value for attribute in sent.resource.attributes
    }
    assert resource["service.name"] == "vlm_server"
    names = [span.name for scope in sent.scope_spans for span in scope.spans]
    assert sorted(names) == ["chat demo", "decode", "prefill", "prepare", "queue", "receive"]


def test_tracing_is_off_without_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tracing.ENDPOINT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert start_tracer(Tracing(), OPERATIONS) is None


def test_missing_otel_extra_is_error_only_by_settings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace.export", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert start_tracer(Tracing(), OPERATIONS) is None
    assert "vlm-server[otel]" in caplog.text
    with pytest.raises(ConfigError, match=r"vlm-server\[otel\]"):
        start_tracer(Tracing("http://127.0.0.1:9/v1/traces"), OPERATIONS)


async def test_unreachable_collector_delays_no_request_or_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    tracer = start_tracer(Tracing("http://127.0.0.1:9/v1/traces"), OPERATIONS)
    assert tracer is not None
    app = create_app(
        Settings(), OneModel(ScriptedEngine(*HELLO[:-1], timed)), parsing_pool(), tracer
    )
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        assert (await client.post(ROUTE, json=chat())).status_code == 200
    started = time.monotonic()
    tracer.close()
    assert time.monotonic() - started < 10
