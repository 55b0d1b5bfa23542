"""OpenAI's client against the real front: chat completions, streams, exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.unit.api.conftest import listening
from tests.unit.api.requests import PNG_URL
from tests.unit.api.scripted_engine import (
    HELLO,
    ScriptedEngine,
    Step,
    calls,
    ended,
    failed,
    finished,
    never,
    scored,
    thinks,
)
from tests.unit.api.scripted_engine import text as says
from vlm_server.protocol import (
    Delta,
    ImagePart,
    Message,
    SamplingParams,
    TextPart,
    TokenLogprob,
    Tokens,
    TokenText,
    ToolCall,
    Usage,
)
from vlm_server.settings import Server, Settings

KEY = "correct-horse-battery"
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": PNG_URL, "detail": "high"}},
        ],
    },
]


@pytest.fixture
async def base_url(engine: ScriptedEngine) -> AsyncIterator[str]:
    async with listening(engine, Settings(server=Server(api_keys=(KEY,)))) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0) as sdk:
        yield sdk


async def test_openai_client_answer_is_echoed_in_follow_up(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    answer = await client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=9, temperature=0, seed=1, stop=["\n"], user="me"
    )
    assert answer.choices[0].message.content == "Hello world"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert engine.submitted[0].sampling == SamplingParams(9, 0.0, None, 1, ("\n",))
    assert engine.submitted[0].messages[1].content == (TextPart("What is this?"), ImagePart(0))

    echoed: Any = answer.choices[0].message.model_dump()
    follow_up = [*MESSAGES, echoed, {"role": "user", "content": "Sure?"}]
    await client.chat.completions.create(model="demo", messages=follow_up)
    assert engine.submitted[1].messages[2].content == (TextPart("Hello world"),)


async def test_openai_client_stream_ends_with_usage(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="demo", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    pieces = [chunk.choices[0].delta.content for chunk in chunks[:-1]]
    assert pieces == ["", "Hello", " world", None]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 9


SCORED = TokenLogprob(TokenText("Hi", -0.25), (TokenText("Hi", -0.25), TokenText("Yo", -2.0)))


async def test_openai_client_reads_log_probabilities(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = (scored("Hi", SCORED), scored("", SCORED), ended(), finished())
    fields: Any = {"model": "demo", "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    answer = await client.chat.completions.create(**fields)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [(entry.token, entry.logprob, entry.bytes) for entry in content] == [
        ("Hi", -0.25, [72, 105])
    ] * 2
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [
        ("Hi", -0.25),
        ("Yo", -2.0),
    ]
    async with client.chat.completions.stream(**fields) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content == content
    assert final.choices[0].message.content == "Hi"


async def test_openai_client_reads_choices_whole_and_streamed(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = (
        *(says("Yes", 1), says("No", 0), ended("stop", 1), says("body", 0), says("And", 2)),
        *(ended("length", 2), ended("stop", 0), finished()),
    )
    fields: Any = {"model": "demo", "messages": MESSAGES, "n": 3}
    expected = [(0, "Nobody", "stop"), (1, "Yes", "stop"), (2, "And", "length")]
    answer = await client.chat.completions.create(**fields)
    assert engine.submitted[0].sampling.n == 3
    found = [(c.index, c.message.content, c.finish_reason) for c in answer.choices]
    assert found == expected

    stream = await client.chat.completions.create(**fields, stream=True)
    texts, reasons = ["", "", ""], [None, None, None]
    async for chunk in stream:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert list(zip(range(3), texts, reasons, strict=True)) == expected


async def test_openai_chat_stream_helper_collects_completion(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="demo", messages=MESSAGES) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello world"


CLICK: Any = {
    "type": "function",
    "function": {
        "name": "click",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}
CALLS = (
    *(thinks("A button."), calls(0, id="call_1", name="click"), calls(0, '{"x"'), calls(0, ": 3}")),
    *(ended("tool_calls"), finished()),
)


@pytest.mark.parametrize("streams", [False, True])
async def test_openai_image_result_reaches_engine(
    client: AsyncOpenAI, engine: ScriptedEngine, streams: bool
) -> None:
    engine.script = CALLS
    completions = client.chat.completions
    if streams:
        async with completions.stream(model="demo", messages=MESSAGES, tools=[CLICK]) as stream:
            answer = await stream.get_final_completion()
    else:
        answer = await completions.parse(model="demo", messages=MESSAGES, tools=[CLICK])
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert (call.id, call.function.name, call.function.parsed_arguments) == (
        *("call_1", "click"),
        {"x": 3},
    )
    assert choice.message.content in (None, "")
    assert getattr(choice.message, "reasoning_content", None) == "A button."

    engine.script = HELLO
    image = {"type": "image_url", "image_url": {"url": PNG_URL}}
    assistant: Any = choice.message
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": [image]}
    answer = await completions.parse(
        model="demo", messages=[*MESSAGES, assistant, result], tools=[CLICK]
    )
    assert answer.choices[0].message.content == "Hello world"
    assert engine.submitted[1].messages[-2:] == (
        Message(
            "assistant",
            (TextPart(""),) if streams else (),
            reasoning="A button.",
            tool_calls=(ToolCall("call_1", "click", '{"x": 3}'),),
        ),
        Message("tool", (ImagePart(1),), tool_call_id="call_1", name="click"),
    )


async def test_openai_client_reads_usage_in_every_chunk(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    def counted(piece: str, num_tokens: int) -> Step:
        return lambda request_id: Tokens((Delta(request_id, piece, usage=Usage(7, num_tokens)),))

    engine.script = (counted("a", 1), counted("b", 2), ended("length"), finished(Usage(7, 2)))
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.chat.completions.create(
        model="demo", messages=MESSAGES, stream=True, stream_options=options
    )
    totals = [chunk.usage.total_tokens if chunk.usage else None async for chunk in stream]
    assert totals == [8, 8, 9, None, 9]
    assert engine.submitted[0].sampling.reports_usage


async def test_synchronous_openai_client_chats_streams_and_lists_models(base_url: str) -> None:
    def work() -> tuple[str | None, list[str | None], list[str]]:
        with OpenAI(base_url=base_url, api_key=KEY, max_retries=0) as sdk:
            whole = sdk.chat.completions.create(model="default", messages=MESSAGES)
            stream = sdk.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
            pieces = [chunk.choices[0].delta.content for chunk in stream]
            models = [model.id for model in sdk.models.list()]
            models.append(sdk.models.retrieve("demo").id)
        return whole.choices[0].message.content, pieces, models

    content, pieces, models = await asyncio.to_thread(work)
    assert content == "Hello world"
    assert pieces == ["", "Hello", " world", None]
    assert models == ["demo", "demo"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "error", "code"),
    [
        ({"model": "gpt-4o"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": 3}, openai.BadRequestError, "invalid_value"),
        ({"n": 9}, openai.BadRequestError, "invalid_value"),
        ({"store": True}, openai.BadRequestError, "unsupported_parameter"),
        ({"logit_bias": {"x": 5}}, openai.BadRequestError, "invalid_value"),
        ({"extra_body": {"made_up": 5}}, openai.BadRequestError, "unsupported_parameter"),
    ],
)
async def test_openai_client_raises_refusals_as_its_exceptions(
    client: AsyncOpenAI, stream: bool, fields: Any, error: type[openai.APIStatusError], code: str
) -> None:
    arguments = {"model": "demo", "messages": MESSAGES, "stream": stream, **fields}
    with pytest.raises(error) as caught:
        await client.chat.completions.create(**arguments)
    assert caught.value.code == code
    assert caught.value.param
    assert caught.value.request_id


async def test_openai_client_raises_authentication_error(base_url: str) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_engine_error_before_first_token_has_its_status(
    client: AsyncOpenAI, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = (failed("engine_died", "The engine ended."),)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(model="demo", messages=MESSAGES, stream=stream)
    assert caught.value.status_code == 502


async def test_openai_client_raises_stream_error_after_earlier_text(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = (says("He"), failed("engine_died", "The engine ended."))
    stream = await client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
    assert [(await anext(stream)).choices[0].delta.content for _ in range(2)] == ["", "He"]
    with pytest.raises(openai.APIError, match="The engine ended"):
        await anext(stream)


async def test_openai_client_retries_after_retry_after(
    base_url: str, engine: ScriptedEngine
) -> None:
    engine.be("restarting", retry_after_seconds=0)

    async def come_back() -> None:
        await asyncio.sleep(0.1)
        engine.be("ready")

    async with AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=1) as patient:
        back = asyncio.create_task(come_back())
        answer = await patient.chat.completions.create(model="demo", messages=MESSAGES)
        await back
    assert answer.choices[0].message.content == "Hello world"


async def test_closed_chat_stream_aborts_request(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = (says("one"), never())
    stream = await client.chat.completions.create(model="demo", messages=MESSAGES, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content == "one":
            break
    await stream.close()
    await asyncio.wait_for(engine.closed.wait(), 1)
    assert len(engine.aborted) == 1
    engine.script = HELLO


async def test_openai_client_timeout_aborts_request(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = (never(),)
    with pytest.raises(openai.APITimeoutError):
        await client.chat.completions.create(model="demo", messages=MESSAGES, timeout=0.2)
    await asyncio.wait_for(engine.closed.wait(), 1)
    assert len(engine.aborted) == 1
