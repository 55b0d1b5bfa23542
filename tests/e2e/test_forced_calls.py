"""Every one of 500 forced tool calls is valid, sixteen at a time, at high temperature."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import jsonschema
import openai
import pytest

from tests.support.daemons import Daemon
from tests.support.images import noise, user
from tests.support.whole_run import few_of

pytestmark = pytest.mark.e2e

NUM_FEW, NUM_REQUESTS, CONCURRENCY = 32, 500, 16
ALL = (range(NUM_FEW), range(NUM_FEW, NUM_REQUESTS))
POINT = {"type": "integer", "minimum": 0, "maximum": 1000}
SCHEMAS: dict[str, dict[str, Any]] = {
    "click": {
        "properties": {"x": POINT, "y": POINT, "button": {"enum": ["left", "right", None]}},
        "required": ["x", "y", "button"],
    },
    "type_text": {
        "properties": {"text": {"type": "string", "maxLength": 12}, "enter": {"type": "boolean"}},
        "required": ["text"],
    },
    "report": {
        "properties": {
            "shape": {"enum": ["circle", "square", "star"]},
            "tags": {"type": "array", "items": {"enum": ["red", "big"]}, "maxItems": 2},
            "at": {"type": "object", "properties": {"x": POINT, "y": POINT}, "required": ["y"]},
        },
        "required": ["shape", "at"],
    },
    "screenshot": {"properties": {}},
}
for _schema in SCHEMAS.values():
    _schema |= {"type": "object", "additionalProperties": False}
    for _part in _schema["properties"].values():
        if _part.get("type") == "object":
            _part["additionalProperties"] = False


def request(number: int) -> dict[str, Any]:
    """A random request, and the names it may call."""
    rng = random.Random(number)
    names = rng.sample(sorted(SCHEMAS), rng.randint(1, len(SCHEMAS)))
    tools = [
        {"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}}
        for name in names
    ]
    named = {"type": "function", "function": {"name": names[0]}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": names[0]}}]}
    choice, callable_names = rng.choice(
        [
            ("required", names),
            (named, names[:1]),
            ({"type": "allowed_tools", "allowed_tools": allowed}, names[:1]),
        ]
    )
    image = noise(number % 7, (64, 64)) if number % 4 == 0 else None
    message = user(image, "Go on.") if image else {"role": "user", "content": f"Go on, {number}."}
    body = {
        "messages": [message],
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": rng.random() < 0.5,
        "temperature": 1.0,
        "seed": number,
        "max_tokens": 1500,
    }
    return {"body": body, "names": callable_names, "is_streamed": rng.random() < 0.5}


async def whole(client: openai.AsyncOpenAI, body: dict[str, Any]) -> tuple[str, list[Any]]:
    """(finish reason, [(name, arguments)]) of a whole answer."""
    answer = await client.chat.completions.create(model="default", **body)
    (choice,) = answer.choices
    assert not choice.message.content
    calls = choice.message.tool_calls or []
    return choice.finish_reason, [(call.function.name, call.function.arguments) for call in calls]


async def streamed(client: openai.AsyncOpenAI, body: dict[str, Any]) -> tuple[str, list[Any]]:
    """The same as `whole`, joined from deltas."""
    reason, calls = "", dict[int, list[str]]()
    async for chunk in await client.chat.completions.create(model="default", stream=True, **body):
        for choice in chunk.choices:
            assert not choice.delta.content
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, ["", ""])
                call[0] += part.function.name or ""
                call[1] += part.function.arguments or ""
    return reason, [tuple(calls[index]) for index in sorted(calls)]


@pytest.mark.parametrize("numbers", few_of(ALL, ALL[:1]), ids=["few", "many"])
async def test_every_forced_call_is_valid(tiny_daemon: Daemon, numbers: range) -> None:
    client = tiny_daemon.async_client(timeout=300)
    places = asyncio.Semaphore(CONCURRENCY)
    invalid = list[Any]()

    async def ask(number: int) -> None:
        wanted = request(number)
        async with places:
            ask_for = streamed if wanted["is_streamed"] else whole
            reason, calls = await ask_for(client, wanted["body"])
        try:
            assert reason == "tool_calls"
            assert calls
            assert wanted["body"]["parallel_tool_calls"] or len(calls) == 1
            for name, arguments in calls:
                assert name in wanted["names"]
                jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        except (AssertionError, ValueError, jsonschema.ValidationError) as error:
            invalid.append((number, reason, calls, error))

    await asyncio.gather(*(ask(number) for number in numbers))
    assert not invalid, f"{len(invalid)} of {len(numbers)}: {invalid[:3]}"
    tiny_daemon.wait_idle()
