"""Costly schemas take memory, time and steps only from their own requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.daemons import ADMIN_KEY, USER_KEY, Daemon, running_daemon, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

SLOW = {"type": "string", "pattern": "^a{99999}$"}
"""Compiles; each token of each choice takes 20 ms and more."""
SMALL = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 1}
NUM_HUGE = int(os.environ.get("ATTACK_SCHEMAS", "10"))
"""Each takes a second or two of a core; each left 170 MB in the engine."""
STREAM_SECONDS = 2.0


def huge_schema(number: int) -> dict[str, Any]:
    """A schema that would take minutes and 20 GB to compile."""
    parts = [{"type": "string", "pattern": f"a{{{i}}}b"} for i in range(1, 200)]
    return {"title": f"{number}", "allOf": parts}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with the embedded model and little memory for schemas, so that huge ones end early.

    Speculation is off: drafts would speed up a repetitive stream while it runs alone."""
    folder = tmp_path_factory.mktemp("schemas")
    memory = f"engine.max_schema_memory_bytes={96 << 20}"
    no_drafts = "scheduler.num_speculative_tokens=0"
    with running_daemon(folder, "--set", memory, "--set", no_drafts) as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> openai.AsyncOpenAI:
    return daemon.async_client(timeout=120)


def completion(client: openai.AsyncOpenAI, schema: Any = None, **fields: Any) -> Awaitable[Any]:
    if schema is not None:
        held = {"name": "answer", "schema": schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": held}
    messages = [{"role": "user", "content": "Hello"}]
    fields = {"model": "default", "messages": messages, "max_tokens": 8, "temperature": 0} | fields
    return client.chat.completions.create(**fields)


def resident_bytes(pid: int) -> int:
    """The resident bytes of `pid` and all its descendants."""
    parents, held = dict[int, int](), dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            number = int(folder.name)
            parents[number] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            pages = int((folder / "statm").read_text().split()[1])
            held[number] = pages * os.sysconf("SC_PAGESIZE")

    def is_below(number: int) -> bool:
        while number not in (0, pid):
            number = parents.get(number, 0)
        return number == pid

    return sum(held[number] for number in held if is_below(number))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the system does not tell")
async def test_refused_schemas_leave_no_memory_and_delay_no_text(
    daemon: Daemon, client: openai.AsyncOpenAI
):
    await completion(client)
    with pytest.raises(openai.BadRequestError):
        await completion(client, huge_schema(-1))
    before = resident_bytes(daemon.process.pid)
    refused = [asyncio.create_task(_refusal(client, huge_schema(i))) for i in range(NUM_HUGE)]
    waits = []
    while not all(task.done() for task in refused):
        started = time.monotonic()
        await completion(client)
        waits.append(time.monotonic() - started)
        await asyncio.sleep(0.05)
    assert len(waits) > 5
    assert sorted(waits)[len(waits) // 2] < 1.0
    assert max(waits) < 5.0, "text waited behind schemas"
    for message in await asyncio.gather(*refused):
        assert "schema" in message
    daemon.wait_idle()
    wait_until(lambda: resident_bytes(daemon.process.pid) - before < 64 << 20, 10, daemon.log)


async def _refusal(client: openai.AsyncOpenAI, schema: Any) -> str:
    with pytest.raises(openai.BadRequestError) as caught:
        await completion(client, schema)
    assert caught.value.param == "response_format.json_schema.schema"
    return caught.value.message


async def test_schema_refusal_is_cached(client: openai.AsyncOpenAI):
    await _refusal(client, huge_schema(1000))
    started = time.monotonic()
    for _ in range(5):
        await _refusal(client, huge_schema(1000))
    assert time.monotonic() - started < 2.0


async def read(stream: Any, arrivals: list[float]) -> None:
    """Record the time of each token of a stream."""
    async for _ in stream:
        arrivals.append(time.monotonic())  # noqa: PERF401


async def test_stream_keeps_its_speed_during_slow_schema(
    daemon: Daemon, client: openai.AsyncOpenAI
):
    """Each step of the slow schema takes 0.2 s and more; once, the stream waited for each."""
    endless = {"max_tokens": 8000, "stream": True, "extra_body": {"ignore_eos": True}}
    stream, arrivals = await completion(client, **endless), list[float]()
    reader = asyncio.create_task(read(stream, arrivals))
    await asyncio.sleep(0.5)
    before = await tokens_per_second(arrivals)
    slow = await completion(client, SLOW, n=8, stream=True, max_tokens=2000)
    for _ in range(24):
        await anext(slow)
    beside = await tokens_per_second(arrivals)
    await anext(slow)
    print(f"{before:.0f} tokens/s before, {beside:.0f} beside")
    await slow.close()
    reader.cancel()
    await stream.close()
    assert beside >= before / 2
    daemon.wait_idle()


async def tokens_per_second(arrivals: list[float]) -> float:
    """Tokens per second from now on."""
    first, started = len(arrivals), time.monotonic()
    await asyncio.sleep(STREAM_SECONDS)
    return (len(arrivals) - first) / (time.monotonic() - started)


async def test_small_schema_is_answered_during_slow_ones(
    daemon: Daemon, client: openai.AsyncOpenAI
):
    slow = [await completion(client, SLOW, n=4, stream=True, max_tokens=2000) for _ in range(2)]
    for stream in slow:
        await anext(stream)
    started = time.monotonic()
    answer = await completion(client, SMALL, max_tokens=50)
    assert json.loads(answer.choices[0].message.content) in ([1], [2])
    assert time.monotonic() - started < 10.0
    for stream in slow:
        await stream.close()
    daemon.wait_idle()


async def test_disconnected_clients_leave_no_grammar_process(
    daemon: Daemon, client: openai.AsyncOpenAI
):
    for _ in range(5):
        stream = await completion(client, SLOW, n=2, stream=True, max_tokens=2000)
        await anext(stream)
        await stream.close()
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(completion(client, huge_schema(2000)), 0.1)
    daemon.wait_idle()
    assert (await completion(client, SMALL, max_tokens=50)).choices[0].finish_reason == "stop"


def deep_parameters(tool: str) -> dict[str, Any]:
    """Tool parameters 40 levels deep."""
    schema: dict[str, Any] = {"type": "string", "title": tool}
    for level in range(20):
        properties = {f"deeper_{level}": schema, f"number_{level}": {"type": "integer"}}
        schema = {"type": "object", "properties": properties, "required": [f"deeper_{level}"]}
    return schema


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": deep_parameters(name)}}


async def test_slow_tools_of_key_delay_no_other_key(keyed_daemon: Daemon):
    """Sixteen requests with 128 new deep tools each. All prompts are too long for the model, which
    shows once the tools are compiled."""
    slow, other = (
        keyed_daemon.async_client(timeout=120, api_key=key) for key in (ADMIN_KEY, USER_KEY)
    )

    async def compiled(number: int) -> None:
        tools = [function(f"slow_{number}_{i}") for i in range(128)]
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await completion(slow, tools=tools, tool_choice="required")

    waiting = [asyncio.create_task(compiled(number)) for number in range(16)]
    await asyncio.sleep(0.2)
    waits = list[float]()
    while not all(task.done() for task in waiting):
        started = time.monotonic()
        tools = [function(f"other_{len(waits)}")]
        await completion(other, tools=tools, tool_choice="required")
        waits.append(time.monotonic() - started)
    await asyncio.gather(*waiting)
    median = statistics.median(waits)
    print(f"{len(waits)} calls of the other key: {median:.2f} s, {max(waits):.2f} at most")
    assert len(waits) >= 3
    assert median < 2.0
    keyed_daemon.wait_idle()
