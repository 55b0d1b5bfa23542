"""Request sequences of programs that speak to Ollama are answered as they expect."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import ollama
import pytest

from tests.support.image_files import image_file
from tests.unit.api.conftest import listening
from tests.unit.api.dialects.ollama.steps import called
from tests.unit.api.scripted_engine import ScriptedEngine, ended, finished, text, thinks
from vlm_server.protocol import ImagePart, ModelFacts, TextPart, ToolCall

JPEG = image_file("JPEG")
FACTS = ModelFacts(
    family="qwen3_vl",
    digest="0" * 64,
    capabilities=("completion", "vision", "tools", "thinking"),
    context_tokens=32_768,
)


@pytest.fixture
async def host(engine: ScriptedEngine) -> AsyncIterator[str]:
    engine.status = replace(engine.status, model_facts=FACTS)
    async with listening(engine) as port:
        yield f"http://127.0.0.1:{port}"


async def test_home_assistant_setup_lists_and_pulls_model(host: str) -> None:
    client = ollama.AsyncClient(host=host)
    names = {model["model"] for model in (await client.list())["models"]}
    assert names == {"demo:latest"}
    assert (await client.pull("demo:latest"))["status"] == "success"


HOME_ASSISTANT_TOOL = {
    "type": "function",
    "function": {
        "name": "HassTurnOn",
        "description": "Turns on a device",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "domain": {"type": "array"}},
        },
    },
}
HOME_ASSISTANT_FIELDS: Any = {
    "model": "demo:latest",
    "tools": [HOME_ASSISTANT_TOOL],
    "stream": True,
    "keep_alive": "-1s",
    "options": {"num_ctx": 8192.0},
    "think": False,
}
PORCH_LIGHT = {"name": "porch", "domain": ["light"]}


def porch_question() -> list[Any]:
    return [
        ollama.Message(role="system", content="You are a voice assistant."),
        ollama.Message(
            role="user", content="What is on the porch?", images=[ollama.Image(value=JPEG)]
        ),
    ]


async def home_assistant_turns(host: str, messages: list[Any]) -> list[Any]:
    client = ollama.AsyncClient(host=host)
    answer = await client.chat(messages=messages, **HOME_ASSISTANT_FIELDS)
    return [turn async for turn in answer]


async def test_home_assistant_receives_tool_call(host: str, engine: ScriptedEngine) -> None:
    engine.script = (
        called(0, "call_x", "HassTurnOn", json.dumps(PORCH_LIGHT)),
        *(ended("tool_calls"), finished()),
    )
    turns = await home_assistant_turns(host, porch_question())
    (call,) = [call for turn in turns for call in turn["message"].get("tool_calls") or ()]
    assert call["function"]["name"] == "HassTurnOn"
    assert call["function"]["arguments"] == PORCH_LIGHT


async def test_home_assistant_tool_result_is_answered(host: str, engine: ScriptedEngine) -> None:
    engine.script = (text("It is "), text("on."), ended(), finished())
    call = ollama.Message.ToolCall(
        function=ollama.Message.ToolCall.Function(name="HassTurnOn", arguments=PORCH_LIGHT)
    )
    messages = [
        *porch_question(),
        ollama.Message(role="assistant", tool_calls=[call]),
        ollama.Message(role="tool", content=json.dumps({"success": ["porch"]})),
    ]
    turns = await home_assistant_turns(host, messages)
    assert "".join(turn["message"]["content"] or "" for turn in turns) == "It is on."
    assert turns[-1]["done"]
    (submit,) = engine.submitted
    assert submit.messages[1].content == (ImagePart(0), TextPart("What is on the porch?"))
    assert submit.messages[2].tool_calls == (
        ToolCall("call_1", "HassTurnOn", json.dumps(PORCH_LIGHT)),
    )
    assert submit.messages[3].tool_call_id == "call_1"
    assert submit.template.enable_thinking is False


async def test_home_assistant_task_gets_structured_output(
    host: str, engine: ScriptedEngine
) -> None:
    client = ollama.AsyncClient(host=host)
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}}
    engine.script = (text('{"count": 2}'), ended(), finished())
    stream = await client.chat(
        model="demo",
        messages=[ollama.Message(role="user", content="How many cars?", images=None)],
        stream=True,
        keep_alive="5s",
        options={"num_ctx": 8192},
        format=schema,
    )
    parts = [part async for part in stream]
    assert "".join(part["message"]["content"] for part in parts) == '{"count": 2}'
    assert json.loads(engine.submitted[0].sampling.json_schema or "") == schema


async def test_frigate_sequence_describes_frames(host: str, engine: ScriptedEngine) -> None:
    client = ollama.AsyncClient(host=host, timeout=30)
    shown = await client.show("demo")
    assert shown.get("error") is None
    info = shown.modelinfo or {}
    assert [value for name, value in info.items() if name.endswith(".context_length")] == [32_768]
    assert "vision" in (shown.capabilities or [])
    assert [model.model for model in (await client.list()).models] == ["demo:latest"]

    engine.script = (thinks("A person."), text(" Someone walks by. "), ended(), finished())
    schema = {"type": "object", "properties": {"title": {"type": "string"}}}
    result = await client.generate(
        "demo",
        "Describe what happens in these frames.",
        images=[JPEG, JPEG],
        keep_alive="1h",
        options={"num_ctx": 8192, "temperature": 0.5},
        format=schema,
        think=False,
    )
    assert result["response"].strip() == "Someone walks by."
    submit = engine.submitted[0]
    assert len(submit.images) == 2
    assert submit.sampling.temperature == 0.5
    assert json.loads(submit.sampling.json_schema or "") == schema


async def test_paperless_ai_request_is_answered(host: str, engine: ScriptedEngine) -> None:
    body = {
        "model": "demo",
        "prompt": "Tag this.",
        "system": "You tag documents.",
        "stream": False,
        "options": {
            "temperature": 0.7,
            "top_p": 0.9,
            "repeat_penalty": 1.1,
            "top_k": 7,
            "num_predict": 256,
            "num_ctx": 100_000,
        },
    }
    async with httpx.AsyncClient(base_url=host) as client:
        answer = await client.post("/api/generate", json=body)
    assert answer.json()["response"] == "Hello world"
    assert answer.headers["x-vlm-ignored"] == "options.num_ctx"
    assert engine.submitted[0].sampling.max_tokens == 256


async def test_open_webui_sequence_lists_shows_and_chats(host: str) -> None:
    image = base64.b64encode(JPEG).decode()
    async with httpx.AsyncClient(base_url=host) as client:
        assert (await client.get("/api/version")).json()["version"]
        (model,) = (await client.get("/api/tags")).json()["models"]
        assert (await client.get("/api/ps")).json()["models"][0]["model"] == model["model"]
        shown = await client.post("/api/show", json={"name": model["model"]})
        assert shown.json()["capabilities"] == ["completion", "vision", "tools", "thinking"]
        question = {"role": "user", "content": "What is this?", "images": [image]}
        body = {"model": model["model"], "messages": [question], "options": {}, "stream": True}
        async with client.stream("POST", "/api/chat", json=body) as response:
            lines = [json.loads(line) async for line in response.aiter_lines()]
    assert [line["message"]["content"] for line in lines] == ["Hello", " world", ""]
    assert {line["model"] for line in lines} == {"demo:latest"}


async def test_curl_without_json_content_type_is_answered(host: str) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    async with httpx.AsyncClient(base_url=host, headers=headers) as client:
        for route, body in (
            ("/api/chat", {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}),
            ("/api/generate", {"model": "demo", "prompt": "hi"}),
            ("/api/show", {"model": "demo"}),
        ):
            answer = await client.post(route, content=json.dumps(body))
            assert answer.status_code == 200, answer.text
        foreign = {"Origin": "https://example.org"}
        answer = await client.post("/api/generate", content="{}", headers=foreign)
        assert answer.status_code == 403


async def test_ollama_command_line_finds_server_up(host: str) -> None:
    async with httpx.AsyncClient(base_url=host) as client:
        assert (await client.head("/")).status_code == 200
        loaded = await client.post("/api/generate", json={"model": "demo", "keep_alive": None})
        assert loaded.json()["done_reason"] == "load"
