"""Silent streams send empty lines, since clients give up when no bytes arrive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import ollama
import pytest

from tests.unit.api.conftest import listening
from tests.unit.api.dialects.ollama.steps import called
from tests.unit.api.scripted_engine import ScriptedEngine, ended, failed, finished, text
from vlm_server.settings import Server, Settings

KEEPALIVE_SECONDS = 0.05
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def host(engine: ScriptedEngine) -> AsyncIterator[str]:
    settings = Settings(server=Server(stream_keepalive_seconds=KEEPALIVE_SECONDS))
    async with listening(engine, settings) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def client(host: str) -> ollama.AsyncClient:
    return ollama.AsyncClient(host, timeout=10)


async def test_ollama_chat_sends_bytes_before_its_first_token(
    client: ollama.AsyncClient, engine: ScriptedEngine
) -> None:
    prefill = asyncio.Event()
    engine.script = (prefill, text("Hello"), ended(), finished())
    stream = await client.chat("demo", HI, stream=True)
    silent = [await anext(stream) for _ in range(3)]
    assert {(part.message.role, part.message.content, part.done) for part in silent} == {
        ("assistant", "", False)
    }
    assert {part.model for part in silent} == {"demo"}
    prefill.set()
    parts = [part async for part in stream]
    assert "".join(part.message.content or "" for part in parts) == "Hello"
    assert parts[-1].done


async def test_ollama_generate_sends_bytes_before_its_first_token(
    client: ollama.AsyncClient, engine: ScriptedEngine
) -> None:
    prefill = asyncio.Event()
    engine.script = (prefill, text("Hello"), ended(), finished())
    stream = await client.generate("demo", "hi", stream=True)
    first = await anext(stream)
    assert (first.response, first.thinking, first.done) == ("", None, False)
    prefill.set()
    assert "".join([part.response async for part in stream]) == "Hello"


async def test_ollama_stream_sends_bytes_while_call_is_written(
    client: ollama.AsyncClient, engine: ScriptedEngine
) -> None:
    """A call is sent once it is complete, so empty lines fill the wait."""
    typing = [called(arguments=" ") for _ in range(5)]
    pauses = [asyncio.Event() for _ in typing]
    written = [step for pair in zip(pauses, typing, strict=True) for step in pair]
    engine.script = (
        called(0, "call_x", "click", '{"x":'),
        *written,
        called(0, arguments="1}"),
        *(ended("tool_calls"), finished()),
    )
    stream = await client.chat("demo", HI, stream=True)
    for pause in pauses:
        part = await anext(stream)
        assert not part.message.tool_calls
        pause.set()
    calls = [call async for part in stream for call in part.message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [{"x": 1}]


async def test_ollama_error_after_keep_alives_is_line(
    client: ollama.AsyncClient, engine: ScriptedEngine
) -> None:
    prefill = asyncio.Event()
    engine.script = (prefill, failed("engine_died", "The engine ended."))
    stream = await client.chat("demo", HI, stream=True)
    assert (await anext(stream)).message.content == ""
    prefill.set()
    with pytest.raises(ollama.ResponseError, match="The engine ended"):
        [part async for part in stream]


async def test_home_assistant_skips_keep_alives(host: str, engine: ScriptedEngine) -> None:
    """Home Assistant begins a message with the first line and appends values other than None."""
    prefill = asyncio.Event()
    engine.script = (prefill, text("It is "), text("on."), ended(), finished())
    client = ollama.AsyncClient(host)
    is_new, shown_messages = True, list[dict[str, Any]]()
    async for response in await client.chat(model="demo", messages=HI, stream=True):
        chunk: dict[str, Any] = {"role": "assistant"} if is_new else {}
        message = response["message"]
        if (calls := message.get("tool_calls")) is not None:
            chunk["tool_calls"] = calls
        if (content := message.get("content")) is not None:
            chunk["content"] = content
        is_new = bool(response["done"])
        shown_messages.append(chunk)
        prefill.set()
    assert shown_messages[0] == {"role": "assistant", "content": ""}
    assert [chunk.get("role") for chunk in shown_messages[1:]] == [None] * (len(shown_messages) - 1)
    assert "".join(chunk["content"] for chunk in shown_messages) == "It is on."


async def test_ollama_whole_answer_has_no_keep_alives(host: str, engine: ScriptedEngine) -> None:
    prefill = asyncio.Event()
    engine.script = (prefill, text("Hello"), ended(), finished())
    body = {"model": "demo", "messages": HI, "stream": False}
    asyncio.get_running_loop().call_later(3 * KEEPALIVE_SECONDS, prefill.set)
    async with httpx.AsyncClient(base_url=host) as client:
        answer = await client.post("/api/chat", json=body)
    assert json.loads(answer.text)["message"]["content"] == "Hello"
