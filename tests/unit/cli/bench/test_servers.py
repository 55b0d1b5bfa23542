"""The bench client measures times at a real socket, and records failures as answers."""

from __future__ import annotations

import pytest

from tests.unit.cli.scripted_server import ScriptedServer, ending, listening, text
from vlm_server.cli.bench.material import user
from vlm_server.cli.bench.servers import BenchTarget, Client
from vlm_server.cli.client.answer import TimedAnswer

MESSAGES = [user("What?")]


async def ask(app: ScriptedServer, timeout_seconds: float = 20.0) -> TimedAnswer:
    async with (
        listening(app) as url,
        Client(BenchTarget("it", url, "model"), timeout_seconds) as client,
    ):
        answer = await client.ask(MESSAGES, 3)
        assert client.take_answers() == [answer]
        assert client.take_answers() == []
        return answer


async def test_bench_client_times_match_arrival_on_socket():
    pieces = [(0.10, text("a")), (0.05, text("b")), (0.20, text("c")), (0.0, ending(3))]
    answer = await ask(ScriptedServer(lambda _: pieces))
    assert answer.text == "abc"
    assert answer.ttft == pytest.approx(0.10, abs=0.04)
    assert answer.gaps == pytest.approx([0.05, 0.20], abs=0.04)
    assert answer.total_seconds == pytest.approx(0.35, abs=0.08)
    assert answer.completion_tokens == 3
    assert answer.error is None


async def test_bench_request_is_greedy_and_streamed_with_usage():
    app = ScriptedServer()
    await ask(app)
    assert app.requests == [
        {
            "model": "model",
            "messages": MESSAGES,
            "max_tokens": 3,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


async def test_bench_client_records_error_status():
    answer = await ask(ScriptedServer(lambda _: [(0.0, b"too busy")], status=429))
    assert answer.error == "HTTP 429: too busy"
    assert answer.ttft is None


async def test_bench_client_records_timeout():
    answer = await ask(ScriptedServer(lambda _: [(0.5, text("late"))]), timeout_seconds=0.1)
    assert answer.error == "no end within 0.1 seconds"


async def test_bench_client_records_refused_connection():
    async with Client(BenchTarget("it", "http://127.0.0.1:9/v1", "model"), 5.0) as client:
        answer = await client.ask(MESSAGES, 3)
    assert answer.error is not None
    assert answer.error.startswith("ConnectError")
