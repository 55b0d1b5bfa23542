"""OpenAI's client against the real front: responses, streams, turns, exceptions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.unit.api.conftest import listening
from tests.unit.api.requests import PNG_URL
from tests.unit.api.scripted_engine import (
    ScriptedEngine,
    Step,
    ended,
    failed,
    finished,
    never,
    thinks,
)
from tests.unit.api.scripted_engine import text as says
from vlm_server.api.http.access.keys import CHECK_SECONDS
from vlm_server.protocol import (
    Delta,
    ImagePart,
    Message,
    TextPart,
    Tokens,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from vlm_server.settings import Server, Settings

KEYS = ("correct-horse-battery", "another-horse-battery")
TOOL: Any = {
    "type": "function",
    "name": "click",
    "description": "Clicks.",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    "strict": True,
}
USAGE = Usage(7, 5, 3, 2)


def calls(index: int, call_id: str = "", name: str = "", arguments: str = "") -> Step:
    call = ToolCallDelta(index, call_id, name, arguments)
    return lambda request_id: Tokens((Delta(request_id, "", tool_call=call),))


AGENT: tuple[Step, ...] = (
    *(thinks("Let me "), thinks("see.")),
    *(says("I "), says("click.")),
    *(calls(0, "call_a", "click"), calls(0, arguments='{"x":'), calls(0, arguments="1}")),
    calls(1, "call_b", "click", '{"x":2}'),
    *(ended("tool_calls"), finished(USAGE)),
)


@pytest.fixture
async def base_url(engine: ScriptedEngine) -> AsyncIterator[str]:
    async with listening(engine, Settings(server=Server(api_keys=KEYS))) as port:
        yield f"http://127.0.0.1:{port}/v1"


@pytest.fixture
async def client(base_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=base_url, api_key=KEYS[0], max_retries=0) as sdk:
        yield sdk


def user_turn(text: str) -> Message:
    return Message("user", (TextPart(text),))


async def test_openai_client_reads_fields_of_response(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    response = await client.responses.create(
        model="demo", input="Hi", instructions="Be brief.", metadata={"a": "b"}, temperature=0
    )
    assert response.output_text == "Hello world"
    assert (response.status, response.error, response.incomplete_details) == (
        "completed",
        None,
        None,
    )
    assert response.id.startswith("resp_")
    assert response.created_at <= (response.completed_at or 0)
    assert (response.metadata, response.instructions) == ({"a": "b"}, "Be brief.")
    assert response.usage is not None
    assert response.usage.total_tokens == 9
    assert response.usage.input_tokens_details.cached_tokens == 3
    (submit,) = engine.submitted
    assert submit.messages == (Message("system", (TextPart("Be brief."),)), user_turn("Hi"))
    assert submit.sampling.temperature == 0


async def test_openai_client_sends_image_with_low_detail(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    content: Any = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": PNG_URL, "detail": "low"},
    ]
    await client.responses.create(model="demo", input=[{"role": "user", "content": content}])
    (submit,) = engine.submitted
    assert submit.messages[0].content == (TextPart("What is this?"), ImagePart(0))
    assert submit.images[0].max_side_pixels == 512


async def test_openai_client_reads_reasoning_text_and_calls(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = AGENT
    response = await client.responses.create(model="demo", input="Click", tools=[TOOL])
    thought, message, first, second = response.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == "Let me see."
    assert message.type == "message"
    assert response.output_text == "I click."
    assert first.type == second.type == "function_call"
    assert (first.call_id, first.name, first.arguments) == ("call_a", "click", '{"x":1}')
    assert (second.call_id, second.arguments) == ("call_b", '{"x":2}')
    assert len({item.id for item in response.output}) == 4
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    tools = engine.submitted[0].tools
    assert tools is not None
    (function,) = json.loads(tools.definitions)
    assert function == {
        "type": "function",
        "function": {name: TOOL[name] for name in ("name", "description", "parameters")},
    }
    assert tools.strict == ("click",)


EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.reasoning_text.delta",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.output_item.added",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
]


async def test_response_stream_events_come_in_order(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = AGENT
    stream = await client.responses.create(model="demo", input="Click", tools=[TOOL], stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events] == EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in added] == [item.id for item in done]
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output == done
    whole = await client.responses.retrieve(last.response.id)
    assert whole.output == last.response.output
    assert whole.usage == last.response.usage


async def test_openai_response_stream_helper_collects_response(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = AGENT
    async with client.responses.stream(model="demo", input="Click", tools=[TOOL]) as stream:
        final = await stream.get_final_response()
    assert final.output_text == "I click."
    call = final.output[2]
    assert call.type == "function_call"
    assert call.arguments == '{"x":1}'


class Answer(BaseModel):
    shape: str


async def test_openai_client_parses_structured_responses(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = (says('{"shape": "circle"}'), ended(), finished())
    parsed = await client.responses.parse(model="demo", input="Hi", text_format=Answer)
    assert parsed.output_parsed == Answer(shape="circle")
    schema = engine.submitted[0].sampling.json_schema
    assert schema is not None
    assert json.loads(schema)["required"] == ["shape"]


@pytest.mark.parametrize("stream", [False, True])
async def test_truncated_response_is_incomplete(
    client: AsyncOpenAI, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = (says("Once upon"), ended("length"), finished())
    arguments: Any = {"model": "demo", "input": "Hi", "max_output_tokens": 2, "stream": stream}
    response = await client.responses.create(**arguments)
    if stream:
        last = [event async for event in response][-1]
        assert last.type == "response.incomplete"
        response = last.response
    assert engine.submitted[0].sampling.max_tokens == 2
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert response.completed_at is None


# ---- turns -----------------------------------------------------------------------------


SEEN: Any = {"type": "input_image", "image_url": PNG_URL}
FIRST_INPUT: Any = [
    {"role": "developer", "content": "Obey."},
    {"role": "user", "content": [{"type": "input_text", "text": "Click"}, SEEN]},
]
CALL_RESULTS: Any = [
    {"type": "function_call_output", "call_id": "call_a", "output": "done"},
    {
        "type": "function_call_output",
        "call_id": "call_b",
        "output": [{"type": "input_text", "text": "See:"}, SEEN],
    },
]


async def test_next_turn_continues_stored_messages(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = AGENT
    first = await client.responses.create(model="demo", input=FIRST_INPUT, tools=[TOOL])
    second = await client.responses.create(
        model="demo", input=CALL_RESULTS, tools=[TOOL], previous_response_id=first.id
    )
    assert second.previous_response_id == first.id
    before, after = engine.submitted
    assert after.messages[:2] == before.messages
    assert after.images[0].content_hash == before.images[0].content_hash
    assert after.messages[2:] == (
        Message(
            "assistant",
            (TextPart("I click."),),
            "Let me see.",
            (ToolCall("call_a", "click", '{"x":1}'), ToolCall("call_b", "click", '{"x":2}')),
        ),
        Message("tool", (TextPart("done"),), tool_call_id="call_a", name="click"),
        Message("tool", (TextPart("See:"), ImagePart(1)), tool_call_id="call_b", name="click"),
    )


async def test_repeated_conversation_equals_stored_one(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """A client that sends the whole conversation again gives the engine the same messages."""
    engine.script = AGENT
    first = await client.responses.create(model="demo", input=FIRST_INPUT, tools=[TOOL])
    await client.responses.create(
        model="demo", input=CALL_RESULTS, tools=[TOOL], previous_response_id=first.id
    )
    output: Any = [item.model_dump() for item in first.output]
    await client.responses.create(model="demo", input=[*FIRST_INPUT, *output, *CALL_RESULTS])
    _, stored, repeated = engine.submitted
    assert repeated.messages == stored.messages
    assert repeated.images[0].content_hash == stored.images[0].content_hash


async def test_input_tokens_count_includes_previous_response(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    first = await client.responses.create(model="demo", input="One")
    engine.script = (finished(Usage(9, 0, 3)),)
    counted = await client.responses.input_tokens.count(
        model="demo", input="Two", previous_response_id=first.id
    )
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", 9)
    hello = Message("assistant", (TextPart("Hello world"),))
    assert engine.submitted[1].messages == (user_turn("One"), hello, user_turn("Two"))
    assert engine.submitted[1].count_only


async def test_stored_items_are_resolved_by_reference(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    """The AI SDK sends references in every turn but the first."""
    engine.script = AGENT
    question: Any = {"role": "user", "content": "Click"}
    first = await client.responses.create(model="demo", input=[question], tools=[TOOL])
    results: Any = [
        {"type": "function_call_output", "call_id": call_id, "output": "done"}
        for call_id in ("call_a", "call_b")
    ]
    echoed: Any = [item.model_dump() for item in first.output]
    await client.responses.create(model="demo", input=[question, *echoed, *results])
    referred: Any = [{"type": "item_reference", "id": item.id} for item in first.output]
    second = await client.responses.create(model="demo", input=[question, *referred, *results])
    assert engine.submitted[2].messages == engine.submitted[1].messages
    listed = await client.responses.input_items.list(second.id, order="asc")
    assert [item.type for item in listed.data[1:-2]] == [item.type for item in first.output]

    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.responses.create(model="demo", input=[question, *referred])
    assert caught.value.param == "input[1]"
    (theirs,) = [item for item in listed.data if item.type == "message" and item.role == "user"]
    again: Any = [{"type": "item_reference", "id": theirs.id}, {"role": "user", "content": "?"}]
    await client.responses.create(model="demo", input=again)
    assert engine.submitted[-1].messages == (user_turn("Click"), user_turn("?"))


async def test_instructions_are_not_carried_over(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    first = await client.responses.create(model="demo", input="One", instructions="Rhyme.")
    await client.responses.create(model="demo", input="Two", previous_response_id=first.id)
    hello = Message("assistant", (TextPart("Hello world"),))
    assert engine.submitted[1].messages == (user_turn("One"), hello, user_turn("Two"))


async def test_streamed_response_can_be_continued(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    stream = await client.responses.create(model="demo", input="One", stream=True)
    events = [event async for event in stream]
    first = events[0]
    assert first.type == "response.created"
    await client.responses.create(model="demo", input="Two", previous_response_id=first.response.id)
    assert len(engine.submitted[1].messages) == 3


async def test_stored_responses_can_be_retrieved_and_deleted(client: AsyncOpenAI) -> None:
    first = await client.responses.create(model="demo", input="One")
    second = await client.responses.create(model="demo", input="Two", previous_response_id=first.id)
    assert await client.responses.retrieve(first.id) == first
    listed = await client.responses.input_items.list(second.id, order="asc")
    texts = [item.content[0].text for item in listed.data]  # type: ignore[union-attr]
    assert texts == ["One", "Hello world", "Two"]
    newest = await client.responses.input_items.list(second.id, limit=1)
    assert newest.data == listed.data[2:]
    assert newest.has_more
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(first.id)
    await client.responses.delete(first.id)
    for lost in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            await lost(first.id)


async def test_deleted_response_disappears_from_later_turns(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    first = await client.responses.create(model="demo", input="One")
    second = await client.responses.create(model="demo", input="Two", previous_response_id=first.id)
    await client.responses.delete(first.id)
    await client.responses.create(model="demo", input="Three", previous_response_id=second.id)
    hello = Message("assistant", (TextPart("Hello world"),))
    assert engine.submitted[2].messages == (user_turn("Two"), hello, user_turn("Three"))


async def test_response_of_another_client_is_not_found(client: AsyncOpenAI, base_url: str) -> None:
    mine = await client.responses.create(model="demo", input="One")
    async with AsyncOpenAI(base_url=base_url, api_key=KEYS[1], max_retries=0) as other:
        for lost in (other.responses.retrieve, other.responses.delete, other.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await lost(mine.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.input_items.list(mine.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await other.responses.create(model="demo", input="2", previous_response_id=mine.id)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


async def test_new_key_of_same_name_sees_no_responses(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_text(f'[laptop]\nkey = "{KEYS[0]}"\n')
    settings = Settings(server=Server(api_key_file=str(file)))
    async with listening(engine, settings) as port:
        url = f"http://127.0.0.1:{port}/v1"
        async with AsyncOpenAI(base_url=url, api_key=KEYS[0], max_retries=0) as before:
            mine = await before.responses.create(model="demo", input="One")
            assert (await before.responses.retrieve(mine.id)).id == mine.id
        file.write_text(f'[laptop]\nkey = "{KEYS[1]}"\n')
        await asyncio.sleep(CHECK_SECONDS + 0.1)
        async with AsyncOpenAI(base_url=url, api_key=KEYS[1], max_retries=0) as after:
            with pytest.raises(openai.NotFoundError):
                await after.responses.retrieve(mine.id)
            with pytest.raises(openai.BadRequestError) as caught:
                await after.responses.create(model="demo", input="2", previous_response_id=mine.id)
    assert caught.value.code == "previous_response_not_found"


async def test_response_with_store_false_is_not_stored(client: AsyncOpenAI) -> None:
    response = await client.responses.create(model="demo", input="One", store=False)
    assert response.model_dump()["store"] is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(model="demo", input="Two", previous_response_id=response.id)


# ---- failures --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_response_engine_error_before_first_token_has_its_status(
    client: AsyncOpenAI, engine: ScriptedEngine, stream: bool
) -> None:
    engine.script = (failed("engine_died", "The engine ended."),)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.responses.create(model="demo", input="Hi", stream=stream)
    assert caught.value.status_code == 502


async def test_engine_error_in_response_stream_is_event(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = (says("He"), failed("engine_died", "The engine ended."))
    stream = await client.responses.create(model="demo", input="Hi", stream=True)
    events: list[Any] = []

    async def read() -> None:
        async for event in stream:
            events.append(event)  # noqa: PERF401  what came before the error counts

    with pytest.raises(openai.APIError, match="The engine ended") as caught:
        await read()
    assert caught.value.code == "engine_died"
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error.message == "The engine ended."
    assert last.response.output_text == "He"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(last.response.id)


async def test_response_stream_helper_raises_engine_error(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = (says("He"), failed("engine_died", "The engine ended."))
    async with client.responses.stream(model="demo", input="Hi") as stream:
        with pytest.raises(openai.APIError, match="The engine ended"):
            await stream.get_final_response()


async def test_closed_response_stream_aborts_and_stores_nothing(
    client: AsyncOpenAI, engine: ScriptedEngine
) -> None:
    engine.script = (says("one"), never())
    stream = await client.responses.create(model="demo", input="Hi", stream=True)
    first = await anext(stream)
    assert first.type == "response.created"
    assert (await client.responses.retrieve(first.response.id)).status == "in_progress"
    await stream.close()
    await asyncio.wait_for(engine.closed.wait(), 1)
    assert len(engine.aborted) == 1
    for _ in range(100):
        try:
            await client.responses.retrieve(first.response.id)
        except openai.NotFoundError:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the response is still there")
