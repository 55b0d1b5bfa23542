"""Anthropic's client against the real front: answers, tools, streams, exceptions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from tests.unit.api.conftest import listening
from tests.unit.api.dialects.anthropic.steps import IMAGE_BLOCK, LOOK, calls, result, stopped_at
from tests.unit.api.dialects.anthropic.steps import text as block
from tests.unit.api.requests import user
from tests.unit.api.scripted_engine import (
    ScriptedEngine,
    Step,
    ended,
    failed,
    finished,
    never,
    text,
    thinks,
)
from vlm_server.protocol import ImagePart, TextPart, ToolCall, Usage
from vlm_server.settings import Server, Settings

KEY = "correct-horse-battery"
IMAGE_QUESTION: Any = [user(IMAGE_BLOCK, block("What is this?"))]
LOOKS: tuple[Step, ...] = (
    thinks("I should "),
    thinks("look."),
    text("Let me look."),
    calls("", "call_1", "look"),
    calls('{"screen"'),
    calls(": 2}"),
    ended("tool_calls"),
    finished(Usage(20, 9, 5)),
)


@pytest.fixture
async def base_url(engine: ScriptedEngine) -> AsyncIterator[str]:
    async with listening(engine, Settings(server=Server(api_keys=(KEY,)))) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=base_url, api_key=KEY, max_retries=0) as sdk:
        yield sdk


async def ask(client: AsyncAnthropic, messages: Any = IMAGE_QUESTION, **fields: Any) -> Any:
    fields = {"model": "demo", "max_tokens": 50, **fields}
    return await client.messages.create(messages=messages, **fields)


async def test_anthropic_message_with_image_reaches_engine(
    client: AsyncAnthropic, engine: ScriptedEngine
) -> None:
    message = await ask(client, system="Be brief.")
    assert [part.text for part in message.content] == ["Hello world"]
    assert (message.role, message.type, message.model) == ("assistant", "message", "demo")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (4, 3, 2)
    assert usage.cache_creation_input_tokens == 0
    (submit,) = engine.submitted
    assert [message.role for message in submit.messages] == ["system", "user"]
    assert submit.messages[1].content == (ImagePart(0), TextPart("What is this?"))
    assert (submit.images[0].format, submit.images[0].param) == ("PNG", "messages[0].content[0]")


async def test_anthropic_screenshot_result_reaches_engine(
    client: AsyncAnthropic, engine: ScriptedEngine
) -> None:
    engine.script = LOOKS
    first = await ask(client, [user("Look!")], tools=[LOOK])
    assert first.stop_reason == "tool_use"
    thought, said, called = first.content
    assert (thought.thinking, said.text) == ("I should look.", "Let me look.")
    assert (called.id, called.name, called.input) == ("call_1", "look", {"screen": 2})

    engine.script = (text("A cat."), ended(), finished())
    history = [
        user("Look!"),
        {"role": "assistant", "content": first.content},
        user(result(IMAGE_BLOCK, block("taken")), block("So?")),
    ]
    second = await ask(client, history, tools=[LOOK])
    assert second.content[0].text == "A cat."
    _, asked, of_tool, more = engine.submitted[1].messages
    assert (asked.reasoning, asked.content) == ("I should look.", (TextPart("Let me look."),))
    assert asked.tool_calls == (ToolCall("call_1", "look", '{"screen": 2}'),)
    assert (of_tool.role, of_tool.tool_call_id, of_tool.name) == ("tool", "call_1", "look")
    assert of_tool.content == (ImagePart(0), TextPart("taken"))
    assert (more.role, more.content) == ("user", (TextPart("So?"),))


async def test_anthropic_stream_adds_up_to_whole_message(
    client: AsyncAnthropic, engine: ScriptedEngine
) -> None:
    engine.script = LOOKS
    whole = await ask(client, tools=[LOOK])
    arguments: Any = {"model": "demo", "max_tokens": 50, "messages": IMAGE_QUESTION}
    async with client.messages.stream(**arguments, tools=[LOOK]) as stream:
        texts = [piece async for piece in stream.text_stream]
        final = await stream.get_final_message()
    assert texts == ["Let me look."]
    assert [part.to_dict() for part in final.content] == [part.to_dict() for part in whole.content]
    assert (final.stop_reason, final.usage.to_dict()) == (whole.stop_reason, whole.usage.to_dict())
    assert final.usage.input_tokens == 15


async def test_anthropic_message_names_its_stop_sequence(
    client: AsyncAnthropic, engine: ScriptedEngine
) -> None:
    engine.script = (text("Hi"), stopped_at("END"), finished())
    message = await ask(client, stop_sequences=["END"])
    assert engine.submitted[0].sampling.stop == ("END",)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    stream = await ask(client, stop_sequences=["END"], stream=True)
    (delta,) = [event.delta async for event in stream if event.type == "message_delta"]
    assert (delta.stop_reason, delta.stop_sequence) == ("stop_sequence", "END")


async def test_anthropic_models_have_their_shape(client: AsyncAnthropic) -> None:
    model = await client.models.retrieve("default")
    assert (model.id, model.type, model.display_name) == ("demo", "model", "demo")
    assert model.created_at.year > 2000
    page = await client.models.list()
    assert page.data == [model]
    assert (page.has_more, page.first_id, page.last_id) == (False, "demo", "demo")


async def test_anthropic_count_tokens_submits_count_only(
    client: AsyncAnthropic, engine: ScriptedEngine
) -> None:
    engine.script = (finished(Usage(123, 0, 100)),)
    counted = await client.messages.count_tokens(
        model="demo",
        messages=IMAGE_QUESTION,
        tools=[LOOK],
        system="Be brief.",  # type: ignore[list-item]
    )
    assert counted.input_tokens == 123
    (submit,) = engine.submitted
    assert submit.count_only
    assert len(submit.images) == 1
    assert submit.tools is not None
    await client.messages.count_tokens(model="demo", messages=[{"role": "user", "content": "hi"}])
    assert engine.submitted[1].count_only
    assert not engine.submitted[1].images


async def test_anthropic_computer_tool_returns_its_action(
    client: AsyncAnthropic, engine: ScriptedEngine
) -> None:
    click = '{"action": "left_click", "coordinate": [3, 2]}'
    engine.script = (calls(click, "call_1", "computer"), ended("tool_calls"), finished())
    message = await client.beta.messages.create(
        model="demo",
        max_tokens=50,
        betas=["computer-use-2025-01-24"],
        messages=IMAGE_QUESTION,
        tools=[
            {
                "type": "computer_20250124",
                "name": "computer",
                "display_width_px": 1024,
                "display_height_px": 768,
            },
            {"type": "bash_20250124", "name": "bash"},
        ],
    )
    assert message.content[0].to_dict()["input"] == {"action": "left_click", "coordinate": [3, 2]}
    tools = engine.submitted[0].tools
    assert tools is not None
    assert "1024 pixels wide" in tools.definitions


async def test_anthropic_output_format_reaches_engine(
    client: AsyncAnthropic, engine: ScriptedEngine
) -> None:
    schema = {"type": "object", "properties": {"colour": {"type": "string"}}}
    await ask(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    json_schema = engine.submitted[0].sampling.json_schema
    assert json_schema is not None
    assert "colour" in json_schema


@pytest.mark.parametrize(
    ("code", "expected", "kind"),
    [
        ("context_length_exceeded", anthropic.BadRequestError, "invalid_request_error"),
        ("memory_exceeded", anthropic.RequestTooLargeError, "request_too_large"),
        ("engine_died", anthropic.InternalServerError, "api_error"),
        ("out_of_memory", anthropic.ServiceUnavailableError, "overloaded_error"),
        ("queue_full", anthropic.RateLimitError, "rate_limit_error"),
        ("queue_timeout", anthropic.DeadlineExceededError, "timeout_error"),
    ],
)
async def test_anthropic_client_raises_engine_errors_by_kind(
    client: AsyncAnthropic,
    engine: ScriptedEngine,
    code: str,
    expected: type[anthropic.APIStatusError],
    kind: str,
) -> None:
    engine.script = (failed(code, "No."),)
    for stream in (False, True):
        with pytest.raises(expected) as caught:
            await ask(client, stream=stream)
        body: Any = caught.value.body
        assert (body["type"], body["error"]["type"], body["error"]["code"]) == ("error", kind, code)
    if code == "context_length_exceeded":
        assert "prompt is too long" in str(caught.value)


async def test_anthropic_stream_error_is_raised_with_its_code(
    client: AsyncAnthropic, engine: ScriptedEngine
) -> None:
    engine.script = (text("Hel"), failed("engine_died", "It died."))
    stream = await ask(client, stream=True)
    with pytest.raises(anthropic.APIStatusError) as caught:
        _ = [event async for event in stream]
    body: Any = caught.value.body
    assert body["error"] == {
        "type": "api_error",
        "message": "It died.",
        "code": "engine_died",
        "param": None,
        "details": {"error_code": "engine_died"},
    }


async def test_anthropic_client_raises_not_found_for_unknown_models(client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await ask(client, model="claude-sonnet")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


async def test_anthropic_client_raises_bad_request_with_field(client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as invalid:
        await ask(client, extra_body={"temperature": 9})
    assert invalid.value.body["error"]["param"] == "temperature"  # type: ignore[index]


async def test_anthropic_client_raises_not_found_for_unknown_batch(client: AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.batches.retrieve("msgbatch_none")


async def test_anthropic_client_raises_authentication_error(
    client: AsyncAnthropic, base_url: str
) -> None:
    async with AsyncAnthropic(base_url=base_url, api_key="wrong-key", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await ask(stranger)
    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


async def test_anthropic_threads_are_refused(client: AsyncAnthropic) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        with pytest.raises(anthropic.BadRequestError) as caught:
            await ask(client, extra_body={"thread": thread})
        assert caught.value.error_code == "thread_unsupported_request"
        assert caught.value.request_id
    assert await ask(client, extra_body={"thread": None})


async def test_either_key_header_is_accepted(base_url: str) -> None:
    for keys in ({"auth_token": KEY}, {"api_key": KEY}):
        async with AsyncAnthropic(base_url=base_url, max_retries=0, **keys) as client:  # type: ignore[arg-type]
            assert (await ask(client)).stop_reason == "end_turn"


async def test_closed_anthropic_stream_aborts_request(
    client: AsyncAnthropic, engine: ScriptedEngine
) -> None:
    engine.script = (text("Hel"), never())
    stream = await ask(client, stream=True)
    async for event in stream:
        if event.type == "content_block_delta":
            break
    await stream.close()
    await engine.closed.wait()
    assert engine.aborted == [engine.submitted[0].request_id]


async def test_truncated_anthropic_call_ends_with_max_tokens(
    client: AsyncAnthropic, engine: ScriptedEngine
) -> None:
    engine.script = (calls("", "call_1", "look"), calls('{"scr'), ended("length"), finished())
    message = await ask(client, tools=[LOOK], tool_choice={"type": "any"})
    assert message.stop_reason == "max_tokens"
    assert message.content[0].input == {}
    stream = await ask(client, tools=[LOOK], tool_choice={"type": "any"}, stream=True)
    pieces = [
        event.delta.partial_json
        async for event in stream
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
    ]
    assert pieces == ['{"scr']
