"""Anthropic's stream events on the wire: names, order, indices, pings."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.unit.api.conftest import Connect
from tests.unit.api.dialects.anthropic.steps import LOOK, ROUTE, calls, request, stopped_at
from tests.unit.api.scripted_engine import (
    ScriptedEngine,
    Step,
    ended,
    failed,
    finished,
    text,
    thinks,
)
from vlm_server.protocol import Usage
from vlm_server.settings import Server, Settings


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    events = []
    for written in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = written.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def details(event: dict[str, Any]) -> list[Any]:
    return [*event.get("delta", event.get("content_block", {})).values()]


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    answer = await client.post(ROUTE, json=request(stream=True, **fields))
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer)


AGENT: tuple[Step, ...] = (
    *(thinks("Hm"), thinks("m."), text("Well"), text(", "), text("look:")),
    *(calls('{"screen":1}', "a", "look"), calls("", "b", "look", 1), calls("{}", index=1)),
    *(text("Done."), ended("tool_calls"), finished(Usage(10, 6, 4))),
)


async def test_anthropic_stream_starts_with_empty_message(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = AGENT
    start, *_ = await stream(client, tools=[LOOK])
    assert start["message"] | {"id": ""} == {
        "id": "",
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        },
    }
    assert start["message"]["id"].startswith("msg_")


async def test_anthropic_content_blocks_come_in_order(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = AGENT
    _, *events, _, _ = await stream(client, tools=[LOOK])
    short = [
        (event["index"], event["type"].removeprefix("content_block_"), *details(event))
        for event in events
    ]
    assert short == [
        (0, "start", "thinking", "", ""),
        (0, "delta", "thinking_delta", "Hm"),
        (0, "delta", "thinking_delta", "m."),
        (0, "delta", "signature_delta", "dmxtX3NlcnZlcg=="),
        (0, "stop"),
        (1, "start", "text", ""),
        (1, "delta", "text_delta", "Well"),
        (1, "delta", "text_delta", ", "),
        (1, "delta", "text_delta", "look:"),
        (1, "stop"),
        (2, "start", "tool_use", "a", "look", {}),
        (2, "delta", "input_json_delta", '{"screen":1}'),
        (2, "stop"),
        (3, "start", "tool_use", "b", "look", {}),
        (3, "delta", "input_json_delta", "{}"),
        (3, "stop"),
        (4, "start", "text", ""),
        (4, "delta", "text_delta", "Done."),
        (4, "stop"),
    ]


async def test_anthropic_stream_ends_with_stop_reason_and_usage(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = AGENT
    *_, ending, stop = await stream(client, tools=[LOOK])
    assert ending["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert ending["usage"] == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 6,
    }
    assert stop == {"type": "message_stop"}


async def test_empty_anthropic_answer_has_no_blocks(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (ended(), finished())
    events = await stream(client)
    assert [event["type"] for event in events] == ["message_start", "message_delta", "message_stop"]
    whole = (await client.post(ROUTE, json=request())).json()
    assert whole["content"] == []


@pytest.mark.parametrize(
    ("reason", "stop", "expected"),
    [
        ("stop", None, "end_turn"),
        ("stop", "\n", "stop_sequence"),
        ("length", None, "max_tokens"),
        ("tool_calls", None, "tool_use"),
    ],
)
async def test_anthropic_stop_reasons_follow_finish_reasons(
    client: httpx.AsyncClient, engine: ScriptedEngine, reason: Any, stop: str | None, expected: str
) -> None:
    engine.script = (text("a"), stopped_at(stop, reason), finished())
    whole = (await client.post(ROUTE, json=request())).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == (expected, stop)
    events = await stream(client)
    assert events[-2]["delta"] == {"stop_reason": expected, "stop_sequence": stop}


async def test_omitted_thinking_has_empty_blocks(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (thinks("secret"), text("a"), ended(), finished())
    for kind in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 5}):
        thinking = {**kind, "display": "omitted"}
        events = await stream(client, thinking=thinking)
        assert "secret" not in json.dumps(events)
        assert events[1]["content_block"]["type"] == "thinking"
        whole = (await client.post(ROUTE, json=request(thinking=thinking))).json()
        assert whole["content"][0]["thinking"] == ""
    assert "secret" in json.dumps(await stream(client))


async def test_silent_anthropic_stream_is_pinged(connect: Connect, engine: ScriptedEngine) -> None:
    quiet = asyncio.Event()
    engine.script = (quiet, text("a"), ended(), finished())
    client = connect(Settings(server=Server(stream_keepalive_seconds=0.05)))
    asking = asyncio.create_task(client.post(ROUTE, json=request(stream=True)))
    await engine.waiting.wait()
    await asyncio.sleep(0.2)
    quiet.set()
    events = events_of(await asking)
    assert events[0] == {"type": "ping"}
    assert next(event["type"] for event in events if event["type"] != "ping") == "message_start"


async def test_error_event_ends_anthropic_stream(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (text("a"), failed("out_of_memory", "No memory."))
    events = await stream(client)
    assert events[-1] == {
        "type": "error",
        "error": {
            "type": "overloaded_error",
            "message": "No memory.",
            "code": "out_of_memory",
            "param": None,
            "details": {"error_code": "out_of_memory"},
        },
    }
    assert "message_stop" not in [event["type"] for event in events]
