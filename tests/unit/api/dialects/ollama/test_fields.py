"""Every field of Ollama's requests has its effect, or is reported as ignored."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.image_files import image_file
from tests.unit.api.requests import PNG_URL
from tests.unit.api.scripted_engine import ScriptedEngine, failed, text
from vlm_server.protocol import ImagePart, SamplingParams, TextPart, ToolCall
from vlm_server.settings import Limits, ModelSettings, Settings

CHAT, GENERATE = "/api/chat", "/api/generate"


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    history = list(messages) or [{"role": "user", "content": "hi"}]
    return {"model": "demo", "messages": history, "stream": False, **fields}


def generate(**fields: Any) -> dict[str, Any]:
    return {"model": "demo", "prompt": "hi", "stream": False, **fields}


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({}, SamplingParams()),
        ({"num_predict": 5}, SamplingParams(max_tokens=5)),
        ({"num_predict": 5.0}, SamplingParams(max_tokens=5)),
        ({"num_predict": -1}, SamplingParams()),
        ({"num_predict": 0}, SamplingParams()),
        ({"num_predict": -2}, SamplingParams(max_tokens=2**31 - 1)),
        ({"temperature": 0}, SamplingParams(temperature=0.0)),
        ({"temperature": 1.5}, SamplingParams(temperature=1.5)),
        ({"top_p": 0.5}, SamplingParams(top_p=0.5)),
        ({"top_p": 0}, SamplingParams(top_p=1e-6)),
        ({"top_k": 40}, SamplingParams(top_k=40)),
        ({"top_k": -1}, SamplingParams(top_k=0)),
        ({"min_p": 0.1}, SamplingParams(min_p=0.1)),
        ({"seed": 7}, SamplingParams(seed=7)),
        ({"seed": -1}, SamplingParams()),
        ({"stop": "x"}, SamplingParams(stop=("x",))),
        ({"stop": ["x", "y"]}, SamplingParams(stop=("x", "y"))),
        ({"repeat_penalty": 1.1}, SamplingParams(repetition_penalty=1.1)),
        ({"presence_penalty": 0.5}, SamplingParams(presence_penalty=0.5)),
        ({"frequency_penalty": 0.5}, SamplingParams(frequency_penalty=0.5)),
        ({"temperature": None, "stop": None}, SamplingParams()),
    ],
)
async def test_ollama_options_reach_engine(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    options: dict[str, Any],
    sampling: SamplingParams,
) -> None:
    for route, body in ((CHAT, chat(options=options)), (GENERATE, generate(options=options))):
        answer = await client.post(route, json=body)
        assert answer.status_code == 200, answer.text
        assert "x-vlm-ignored" not in answer.headers
    if sampling.max_tokens is None:
        sampling = msgspec.structs.replace(sampling, max_tokens=Limits().default_max_tokens)
    assert [submit.sampling for submit in engine.submitted] == [sampling] * 2


IGNORED_OPTIONS = {
    "f16_kv": True,
    "low_vram": False,
    "main_gpu": 0,
    "mirostat": 2,
    "mirostat_eta": 0.1,
    "mirostat_tau": 5.0,
    "num_batch": 512,
    "num_ctx": 100_000,
    "num_gpu": -1,
    "num_keep": 24,
    "num_thread": 0,
    "numa": False,
    "penalize_newline": True,
    "repeat_last_n": 64,
    "tfs_z": 1,
    "typical_p": 0.7,
    "use_mlock": False,
    "use_mmap": True,
}


@pytest.mark.parametrize("name", ["llama3.2-vision", "llama3.2-vision:latest", "llava:7b"])
async def test_ollama_requests_accept_model_aliases(
    connect: Any, engine: ScriptedEngine, name: str
) -> None:
    settings = Settings(model=ModelSettings(aliases=("llama*", "llava:7b")))
    answer = await connect(settings).post(CHAT, json={**chat(), "model": name})
    assert answer.json()["model"] == name
    shown = await connect(settings).post("/api/show", json={"model": name})
    assert shown.status_code == 200


@pytest.mark.parametrize("num_ctx", [0, -1, 8192.5, 10**30, "8192", [1]])
async def test_ollama_accepts_any_context_size(client: httpx.AsyncClient, num_ctx: Any) -> None:
    answer = await client.post(CHAT, json=chat(options={"num_ctx": num_ctx}))
    assert (answer.status_code, answer.headers["x-vlm-ignored"]) == (200, "options.num_ctx")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"keep_alive": -1}, "keep_alive"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 3, "logprobs": True}, None),
        ({"keep_alive": None, "made_up": None}, None),
        ({"truncate": True, "shift": False}, "truncate, shift"),
        ({"\u00fcber, x": 1}, "?ber??x"),
        ({f"f{i}": 1 for i in range(40)}, ", ".join([*(f"f{i}" for i in range(31)), "..."])),
        (
            {"messages": [{"role": "user", "content": "hi", "name": "me", "thinking": "x"}]},
            "messages[].thinking, messages[].name",
        ),
        ({"messages": [{"role": "user", "content": "hi", "id": 5}] * 2}, "messages[].id"),
    ],
)
async def test_unknown_ollama_fields_are_reported(
    client: httpx.AsyncClient,
    caplog: pytest.LogCaptureFixture,
    fields: dict[str, Any],
    named: str | None,
) -> None:
    with caplog.at_level(logging.INFO, "vlm_server.api"):
        answer = await client.post(CHAT, json=chat(**fields))
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-vlm-ignored") == named
    assert f"ignored={(named or '-').replace(', ', ',')}" in caplog.text


async def test_ollama_load_request_reports_generation_fields(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    wanted = {"options": {"seed": 1}, "format": "json", "think": False}
    answer = await client.post(CHAT, json={**chat(), "messages": [], **wanted})
    assert (answer.status_code, answer.headers["x-vlm-ignored"]) == (200, "format, options, think")
    answer = await client.post(GENERATE, json=generate(prompt="", system="Be brief."))
    assert (answer.status_code, answer.headers["x-vlm-ignored"]) == (200, "system")
    assert engine.submitted == []


@pytest.mark.parametrize(
    ("route", "fields", "named"),
    [
        ("/api/show", {"model": "demo"}, None),
        ("/api/show", {"name": "demo"}, None),
        ("/api/show", {"model": "demo", "name": "demo", "verbose": None}, None),
        ("/api/show", {"model": "demo", "verbose": True}, "verbose"),
        ("/api/show", {"model": "demo", "name": "other", "stream": True}, "stream, name"),
        ("/api/pull", {"model": "demo", "stream": False}, None),
        ("/api/pull", {"model": "demo", "insecure": True}, "insecure"),
    ],
)
async def test_ignored_fields_of_routes_about_models_are_reported(
    client: httpx.AsyncClient, route: str, fields: dict[str, Any], named: str | None
) -> None:
    answer = await client.post(route, json=fields)
    assert (answer.status_code, answer.headers.get("x-vlm-ignored")) == (200, named)


async def test_ollama_streams_by_default(client: httpx.AsyncClient) -> None:
    body = chat()
    del body["stream"]
    answer = await client.post(CHAT, json=body)
    assert answer.headers["content-type"] == "application/x-ndjson"
    lines = answer.text.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("{") for line in lines)


async def test_ollama_image_may_be_data_url(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    await client.post(CHAT, json=chat({"role": "user", "images": [PNG_URL]}))
    assert engine.submitted[0].messages[0].content == (ImagePart(0),)
    assert engine.submitted[0].images[0].data == image_file("PNG")
    await client.post(GENERATE, json=generate(prompt=None, images=[PNG_URL]))
    assert engine.submitted[1].messages[0].content == (ImagePart(0),)


@pytest.mark.parametrize("role", ["system", "assistant"])
async def test_ollama_images_are_refused_outside_user_and_tool_messages(
    client: httpx.AsyncClient, role: str
) -> None:
    wrong = {"role": role, "content": "hi", "images": [PNG_URL]}
    answer = await client.post(CHAT, json=chat({"role": "user", "content": "hi"}, wrong))
    assert answer.status_code == 400
    assert answer.json() == {
        "error": f"Images are not allowed in messages of role '{role}'. (`messages[1].images`)"
    }


@pytest.mark.parametrize("words", ["It is", ""])
async def test_ollama_continues_last_assistant_text(
    client: httpx.AsyncClient, engine: ScriptedEngine, words: str
) -> None:
    begun = {"role": "assistant", "content": words}
    await client.post(CHAT, json=chat({"role": "user", "content": "hi"}, begun))
    assert engine.submitted[0].template.continue_final is bool(words)
    assert engine.submitted[0].messages[1].content == (TextPart(words),)


def turn(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def call(name: str, **fields: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {}}, **fields}


@pytest.mark.parametrize(
    ("calls", "results", "expected"),
    [
        ([call("a"), call("b")], [{}, {}], [("call_1", "a"), ("call_2", "b")]),
        (
            [call("a"), call("b")],
            [{"tool_name": "b"}, {"tool_name": "a"}],
            [("call_2", "b"), ("call_1", "a")],
        ),
        ([call("a"), call("b")], [{"name": "b"}, {}], [("call_2", "b"), ("call_1", "a")]),
        (
            [call("a", id="x"), call("a", id="y")],
            [{"tool_call_id": "y"}, {"tool_call_id": "x"}],
            [("y", "a"), ("x", "a")],
        ),
        ([call("a")], [{"tool_name": "c"}, {}, {}], [("", "c"), ("call_1", "a"), ("", "")]),
    ],
)
async def test_ollama_tool_result_is_matched_to_its_call(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    calls: list[dict[str, Any]],
    results: list[dict[str, Any]],
    expected: list[tuple[str, str]],
) -> None:
    messages = [{"role": "tool", "content": "done", **result} for result in results]
    await client.post(CHAT, json=chat({"role": "user", "content": "hi"}, turn(*calls), *messages))
    found = engine.submitted[0].messages[2:]
    assert [(message.tool_call_id, message.name) for message in found] == expected


@pytest.mark.parametrize("arguments", [{"x": 1}, '{"x": 1}'])
async def test_ollama_arguments_may_be_text(
    client: httpx.AsyncClient, engine: ScriptedEngine, arguments: Any
) -> None:
    assistant = turn({"function": {"name": "a", "arguments": arguments}})
    await client.post(CHAT, json=chat({"role": "user", "content": "hi"}, assistant))
    assert engine.submitted[0].messages[1].tool_calls == (ToolCall("call_1", "a", '{"x": 1}'),)


async def test_ollama_arguments_must_be_object(client: httpx.AsyncClient) -> None:
    wrong = turn({"function": {"name": "a", "arguments": [1]}})
    answer = await client.post(CHAT, json=chat({"role": "user", "content": "hi"}, wrong))
    assert answer.status_code == 400
    assert "messages[1].tool_calls[0].function.arguments" in answer.json()["error"]


@pytest.mark.parametrize(
    ("limits", "messages"),
    [
        (Limits(max_messages=1), [{"role": "user", "content": "hi"}] * 2),
        (Limits(max_parts=2), [{"role": "user", "content": "hi"}] * 3),
        (Limits(max_images=1), [{"role": "user", "content": "hi", "images": ["x", "x"]}]),
        (Limits(max_text_bytes=3), [{"role": "user", "content": "four"}]),
        (
            Limits(max_text_bytes=20),
            [{"role": "user", "content": "hi"}, turn(call("a-very-long-name"))],
        ),
    ],
)
async def test_ollama_messages_obey_limits(
    connect: Any, limits: Limits, messages: list[dict[str, Any]]
) -> None:
    answer = await connect(Settings(limits=limits)).post(CHAT, json=chat(*messages))
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("At most ")


async def test_unknown_routes_and_methods_are_in_ollamas_shape(client: httpx.AsyncClient) -> None:
    for method, path, status in (("GET", "/api/none", 404), ("GET", CHAT, 405)):
        answer = await client.request(method, path)
        assert answer.status_code == status
        assert list(answer.json()) == ["error"]


async def test_ollama_failure_before_stream_has_its_status(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (text(""), failed("out_of_memory", "Too little memory."))
    answer = await client.post(CHAT, json=chat(stream=True))
    assert (answer.status_code, answer.json()) == (503, {"error": "Too little memory."})


async def test_ollama_version_and_root_route_answer(client: httpx.AsyncClient) -> None:
    version = (await client.get("/api/version")).json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 9, 0)
    assert (await client.head("/")).status_code == 200
    assert "Ollama is running" in (await client.get("/")).text
