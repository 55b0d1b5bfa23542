"""Ollama's client against the real front: answers, streams, tools, exceptions."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import ollama
import pytest
from ollama import AsyncClient, Client, ResponseError

from tests.support.image_files import image_file
from tests.unit.api.conftest import listening
from tests.unit.api.dialects.ollama.steps import called
from tests.unit.api.fields.vector_fields import VECTORS
from tests.unit.api.scripted_engine import (
    ScriptedEngine,
    ended,
    failed,
    finished,
    never,
    scored,
    thinks,
)
from tests.unit.api.scripted_engine import text as says
from vlm_server.protocol import (
    ImagePart,
    ModelFacts,
    TemplateOptions,
    TextPart,
    TokenLogprob,
    TokenText,
    ToolCall,
    Usage,
)
from vlm_server.settings import Server, Settings

PNG = image_file("PNG")
HI: list[Any] = [{"role": "user", "content": "hi"}]
FACTS = ModelFacts(
    family="qwen3_vl",
    num_parameters=3_754_622_976,
    size_bytes=7_509_245_952,
    quantization="bfloat16",
    digest="ab" * 32,
    modified_at=1_790_000_000.0,
    capabilities=("completion", "vision", "video", "tools", "thinking"),
    context_tokens=32_768,
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Which one"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
def client(host: str) -> AsyncClient:
    return AsyncClient(host)


@pytest.mark.parametrize("model", ["demo", "demo:latest", "default"])
async def test_ollama_whole_answer_has_its_fields(
    client: AsyncClient, engine: ScriptedEngine, model: str
) -> None:
    engine.script = (says("Hello"), says(" world"), ended("length"), finished(Usage(7, 2, 3)))
    answer = await client.chat(model, HI, stream=False)
    assert (answer.message.role, answer.message.content) == ("assistant", "Hello world")
    assert answer.message.thinking is answer.message.tool_calls is None
    assert (answer.model, answer.done, answer.done_reason) == (model, True, "length")
    assert (answer.prompt_eval_count, answer.eval_count) == (7, 2)
    assert answer.created_at is not None
    assert answer.created_at.endswith("Z")


async def test_ollama_stream_ends_with_done_and_counts(client: AsyncClient) -> None:
    parts = [part async for part in await client.chat("demo", HI, stream=True)]
    assert [part.message.content for part in parts] == ["Hello", " world", ""]
    assert [part.done for part in parts] == [False, False, True]
    assert (parts[-1].done_reason, parts[-1].prompt_eval_count) == ("stop", 7)
    assert parts[0].total_duration is None


async def test_synchronous_ollama_client_chats_and_streams(host: str) -> None:
    def work() -> tuple[str | None, list[str | None]]:
        client = Client(host)
        whole = client.chat("demo", HI)
        pieces = [part.message.content for part in client.chat("demo", HI, stream=True)]
        return whole.message.content, pieces

    assert await asyncio.to_thread(work) == ("Hello world", ["Hello", " world", ""])


async def test_ollama_images_come_before_text(client: AsyncClient, engine: ScriptedEngine) -> None:
    question: Any = {"role": "user", "content": "What is this?", "images": [PNG, PNG]}
    await client.chat("demo", [question])
    (message,) = engine.submitted[0].messages
    assert message.content == (ImagePart(0), ImagePart(1), TextPart("What is this?"))
    image = engine.submitted[0].images[1]
    assert (image.data, image.format, image.param) == (PNG, "PNG", "messages[0].images[1]")


@pytest.mark.parametrize("stream", [False, True])
async def test_ollama_calls_are_separate_from_reasoning_and_content(
    client: AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = (
        *(thinks("Which city?"), says("Let me see.")),
        *(called(0, "call_a", "weather", '{"city":'), called(0, arguments='"Paris"}')),
        *(called(1, "call_b", "weather", '{"city": "Rome"}'), says("Wait.")),
        *(ended("tool_calls"), finished()),
    )
    answer: Any = client.chat("demo", HI, tools=[WEATHER], stream=stream)
    answers = [part async for part in await answer] if stream else [await answer]
    assert "".join(part.message.thinking or "" for part in answers) == "Which city?"
    assert "".join(part.message.content or "" for part in answers) == "Let me see.Wait."
    calls = [call for part in answers for call in part.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", {"city": "Paris"}),
        ("weather", {"city": "Rome"}),
    ]
    assert answers[-1].done_reason == "stop"

    tools = engine.submitted[0].tools
    assert tools is not None
    assert json.loads(tools.definitions) == [WEATHER]
    assert (tools.choice, tools.parallel) == ("auto", True)


async def test_ollama_image_result_reaches_engine(
    client: AsyncClient, engine: ScriptedEngine
) -> None:
    calls = [
        ollama.Message.ToolCall(
            function=ollama.Message.ToolCall.Function(name="weather", arguments={"city": city})
        )
        for city in ("Paris", "Rome")
    ]
    assistant = ollama.Message(role="assistant", thinking="Which city?", tool_calls=calls)
    results: list[Any] = [
        {"role": "tool", "content": "rain", "tool_name": "weather"},
        {"role": "tool", "content": "sun", "images": [PNG]},
    ]
    engine.script = (says("Take an umbrella."), ended(), finished())
    await client.chat("demo", [*HI, assistant, *results], tools=[WEATHER])
    _, turn, rain, sun = engine.submitted[0].messages
    assert turn.reasoning == "Which city?"
    assert turn.content == ()
    assert turn.tool_calls == (
        ToolCall("call_1", "weather", '{"city": "Paris"}'),
        ToolCall("call_2", "weather", '{"city": "Rome"}'),
    )
    assert (rain.role, rain.content) == ("tool", (TextPart("rain"),))
    assert (rain.tool_call_id, rain.name) == ("call_1", "weather")
    assert (sun.tool_call_id, sun.name) == ("call_2", "weather")
    assert sun.content == (ImagePart(0), TextPart("sun"))


async def test_ollama_client_turns_function_into_tool(
    client: AsyncClient, engine: ScriptedEngine
) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first
            b: The second
        """
        return a + b

    await client.chat("demo", HI, tools=[add])
    tools = engine.submitted[0].tools
    assert tools is not None
    (function,) = (tool["function"] for tool in json.loads(tools.definitions))
    assert (function["name"], function["parameters"]["required"]) == ("add", ["a", "b"])


async def test_truncated_ollama_call_is_text(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = (called(0, "call_a", "weather", '{"city": "Pa'), ended("length"), finished())
    answer = await client.chat("demo", HI, tools=[WEATHER])
    assert (answer.message.content, answer.message.tool_calls) == ('{"city": "Pa', None)
    assert answer.done_reason == "length"


@pytest.mark.parametrize(
    ("think", "template"),
    [
        (None, TemplateOptions()),
        (True, TemplateOptions(True)),
        (False, TemplateOptions(False)),
        ("high", TemplateOptions(True, '{"reasoning_effort":"high"}')),
    ],
)
async def test_ollama_think_separates_reasoning_from_content(
    client: AsyncClient, engine: ScriptedEngine, think: Any, template: TemplateOptions
) -> None:
    engine.script = (thinks("Hm. "), thinks("Yes."), says("42"), ended(), finished())
    answer = await client.chat("demo", HI, think=think)
    assert (answer.message.thinking, answer.message.content) == ("Hm. Yes.", "42")
    parts = [part async for part in await client.generate("demo", "hi", stream=True, think=think)]
    assert [(part.thinking, part.response) for part in parts] == [
        *(("Hm. ", ""), ("Yes.", "")),
        *((None, "42"), (None, "")),
    ]
    assert [submit.template for submit in engine.submitted] == [template] * 2


@pytest.mark.parametrize(
    ("wanted", "schema"),
    [
        ("", None),
        ("json", {"type": "object"}),
        ({"type": "object", "required": ["b", "a"]}, {"type": "object", "required": ["b", "a"]}),
    ],
)
async def test_ollama_format_reaches_engine(
    client: AsyncClient, engine: ScriptedEngine, wanted: Any, schema: Any
) -> None:
    await client.chat("demo", HI, format=wanted)
    await client.generate("demo", "hi", format=wanted)
    for submit in engine.submitted:
        found = submit.sampling.json_schema
        assert (None if found is None else json.loads(found)) == schema


async def test_ollama_generate_answers_with_system_and_image(
    client: AsyncClient, engine: ScriptedEngine
) -> None:
    answer = await client.generate("demo", "What is this?", system="Be brief.", images=[PNG])
    assert (answer.response, answer.thinking, answer.done_reason) == ("Hello world", None, "stop")
    system, user = engine.submitted[0].messages
    assert (system.role, system.content) == ("system", (TextPart("Be brief."),))
    assert (user.role, user.content) == ("user", (ImagePart(0), TextPart("What is this?")))


async def test_ollama_generate_streams(client: AsyncClient) -> None:
    parts = [part async for part in await client.generate("demo", "hi", stream=True)]
    assert [part.response for part in parts] == ["Hello", " world", ""]
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("stop", 2)


async def test_ollama_answer_has_log_probabilities(
    client: AsyncClient, engine: ScriptedEngine
) -> None:
    entry = TokenLogprob(TokenText("Hi", -0.25), (TokenText("Hi", -0.25), TokenText("Yo", -2.0)))
    engine.script = (scored("Hi", entry), scored(""), ended(), finished())
    answer = await client.chat("demo", HI, logprobs=True, top_logprobs=2)
    assert engine.submitted[0].sampling.logprobs == 2
    assert answer.logprobs is not None
    (found,) = answer.logprobs
    assert (found.token, found.logprob) == ("Hi", -0.25)
    assert [(top.token, top.logprob) for top in found.top_logprobs or ()] == [
        ("Hi", -0.25),
        ("Yo", -2.0),
    ]


async def test_ollama_durations_measure_prompt_and_answer(
    client: AsyncClient, engine: ScriptedEngine
) -> None:
    first, last = asyncio.Event(), asyncio.Event()
    engine.script = (first, says("Hello"), last, ended(), finished())
    loop = asyncio.get_running_loop()
    loop.call_later(0.2, first.set)
    loop.call_later(0.5, last.set)
    answer = await client.chat("demo", HI)
    assert answer.total_duration is not None
    assert answer.prompt_eval_duration is not None
    assert answer.eval_duration is not None
    assert answer.load_duration == 0
    assert answer.prompt_eval_duration >= 0.15e9
    assert answer.eval_duration >= 0.25e9
    total = answer.prompt_eval_duration + answer.eval_duration
    assert abs(answer.total_duration - total) <= 2


@pytest.mark.parametrize(("keep_alive", "reason"), [(None, "load"), (-1, "load"), (0, "unload")])
async def test_ollama_load_request_submits_nothing(
    client: AsyncClient, engine: ScriptedEngine, keep_alive: Any, reason: str
) -> None:
    chat = await client.chat("demo", keep_alive=keep_alive)
    assert (chat.message.content, chat.done, chat.done_reason) == ("", True, reason)
    generate = await client.generate("demo", keep_alive=keep_alive)
    assert (generate.response, generate.done_reason) == ("", reason)
    (line,) = [part async for part in await client.generate("demo", stream=True)]
    assert (line.done, line.done_reason) == (True, "load")
    assert engine.submitted == []


async def test_ollama_list_has_models_facts(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.status = replace(engine.status, model_facts=FACTS)
    (model,) = (await client.list()).models
    assert (model.model, model.size, model.digest) == ("demo:latest", 7_509_245_952, "ab" * 32)
    assert model.modified_at is not None
    assert model.modified_at.timestamp() == 1_790_000_000
    assert model.details is not None
    assert (model.details.family, model.details.families) == ("qwen3_vl", ["qwen3_vl"])
    assert (model.details.parameter_size, model.details.quantization_level) == ("3.8B", "BF16")


async def test_ollama_show_has_models_facts(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.status = replace(engine.status, model_facts=FACTS)
    shown = await client.show("demo")
    assert shown.capabilities == ["completion", "vision", "tools", "thinking"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "qwen3_vl"
    assert shown.modelinfo["qwen3_vl.context_length"] == 32_768
    (model,) = (await client.list()).models
    assert shown.details == model.details
    assert "tools" in (shown.template or "").lower()


async def test_ollama_ps_has_loaded_model(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.status = replace(engine.status, model_facts=FACTS)
    (running,) = (await client.ps()).models
    assert (running.name, running.size, running.context_length) == (
        *("demo:latest", 7_509_245_952),
        32_768,
    )
    assert running.expires_at is not None
    assert running.expires_at.year > 2200


async def test_ollama_model_without_tools_lists_no_tools_capability(
    client: AsyncClient, engine: ScriptedEngine
) -> None:
    shown = await client.show("demo")
    assert shown.capabilities == ["completion", "vision"]
    assert shown.template == "{{ range .Messages }}{{ .Content }}{{ end }}"
    (model,) = (await client.list()).models
    assert len(model.digest or "") == 64


async def test_ollama_show_is_503_while_model_starts(
    client: AsyncClient, engine: ScriptedEngine
) -> None:
    engine.be("starting")
    with pytest.raises(ResponseError) as caught:
        await client.show("demo")
    assert caught.value.status_code == 503
    assert (await client.ps()).models == []
    assert len((await client.list()).models) == 1


async def test_ollama_show_describes_unloaded_model_partly(
    client: AsyncClient, engine: ScriptedEngine
) -> None:
    """Clients send `show` first, and nothing else would load the model."""
    engine.be("unloaded")
    shown = await client.show("demo")
    assert shown.capabilities == ["completion", "vision"]
    assert shown.modelinfo == {}


async def test_ollama_pull_of_served_model_succeeds_at_once(client: AsyncClient) -> None:
    assert (await client.pull("demo")).status == "success"
    states = [state.status async for state in await client.pull("demo", stream=True)]
    assert states[-1] == "success"
    with pytest.raises(ResponseError, match="not found"):
        await client.pull("llama3.2-vision")


async def test_unsupported_ollama_routes_are_501(client: AsyncClient) -> None:
    for work in (
        client.create("mine", from_="demo"),
        client.copy("demo", "mine"),
        client.push("demo"),
        client.delete("demo"),
    ):
        with pytest.raises(ResponseError, match="can't be changed") as caught:
            await work
        assert caught.value.status_code == 501


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "llava"}, 404, "model 'llava' not found"),
        ({"options": {"temperature": 3}}, 400, "options.temperature"),
        ({"options": {"seed": 1.5}}, 400, "options.seed"),
        ({"options": {"stop": ["s"] * 17}}, 400, "stop strings"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, 400, "role"),
        ({"messages": [{**HI[0], "images": ["AAAA"]}]}, 400, r"messages\[0\].images\[0\]"),
        ({"messages": [{**HI[0], "images": ["no base64"]}]}, 400, "image"),
        ({"messages": [{"role": "system", "content": "hi"}]}, 400, "user"),
        ({"tools": [{"function": {"name": "no good name"}}]}, 400, "letters"),
    ],
)
async def test_ollama_refusals_have_status_and_message(
    host: str, stream: bool, fields: dict[str, Any], status: int, message: str
) -> None:
    client = AsyncClient(host)
    body = {"model": "demo", "messages": HI, "stream": stream, **fields}
    with pytest.raises(ResponseError, match=message) as caught:
        await client._request_raw("POST", "/api/chat", json=body)
    assert caught.value.status_code == status


@pytest.mark.parametrize("field", [{"suffix": "x"}, {"template": "x"}, {"raw": True}])
async def test_ollama_generate_refuses_unsupported_fields(
    client: AsyncClient, field: dict[str, Any]
) -> None:
    with pytest.raises(ResponseError, match=next(iter(field))) as caught:
        await client.generate("demo", "hi", **field)
    assert caught.value.status_code == 400


async def test_ollama_error_before_first_token_has_its_status(
    client: AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (failed("engine_died", "The engine ended."),)
    for work in (client.chat("demo", HI), client.generate("demo", "hi")):
        with pytest.raises(ResponseError, match="The engine ended") as caught:
            await work
        assert caught.value.status_code == 502


async def test_ollama_stream_error_is_last_line(
    client: AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (says("He"), failed("engine_died", "The engine ended."))
    stream = await client.chat("demo", HI, stream=True)
    assert (await anext(stream)).message.content == "He"
    with pytest.raises(ResponseError, match="The engine ended"):
        await anext(stream)


async def test_closed_ollama_stream_aborts_request(
    client: AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (says("one"), never())
    stream = await client.chat("demo", HI, stream=True)
    assert (await anext(stream)).message.content == "one"
    await stream.aclose()
    await asyncio.wait_for(engine.closed.wait(), 1)
    assert len(engine.aborted) == 1


async def test_ollama_client_needs_key(engine: ScriptedEngine) -> None:
    settings = Settings(server=Server(api_keys=("correct-horse-battery",)))
    async with listening(engine, settings) as port:
        host = f"http://127.0.0.1:{port}"
        with pytest.raises(ResponseError, match="API key") as caught:
            await AsyncClient(host).list()
        assert caught.value.status_code == 401
        known = AsyncClient(host, headers={"Authorization": "Bearer correct-horse-battery"})
        assert len((await known.list()).models) == 1


async def test_ollama_client_gets_vectors(client: AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = VECTORS
    answer = await client.embed("demo:latest", "hi", keep_alive="5m")
    assert answer.model == "demo:latest"
    assert answer.embeddings == [[1.0, 0.0]]
    assert answer.prompt_eval_count == 3
    assert answer.total_duration
    assert (await client.embeddings("demo", "hi")).embedding == [1.0, 0.0]
    with pytest.raises(ResponseError, match=r"limits\.max_inputs") as refused:
        await client.embed("demo", ["hi"] * 5000)
    assert refused.value.status_code == 400


@pytest.mark.parametrize("nothing", [[], ""])
async def test_embed_request_without_input_only_loads_model(
    client: AsyncClient, engine: ScriptedEngine, nothing: list[str] | str
) -> None:
    answer = await client.embed("demo", nothing)
    assert answer.embeddings == []
    assert (await client.embeddings("demo", "")).embedding == []
    assert not engine.submitted
