"""The cases of Open Responses (all but files), and the shape of their responses.

The specification: https://www.openresponses.org. `ResponseResource` says what a response requires;
the cases restate those of the specification's compliance tests."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest

from tests.unit.api.dialects.responses.requests import ROUTE, asking, tool
from tests.unit.api.dialects.responses.test_openai_client import AGENT, calls
from tests.unit.api.requests import PNG_URL, user
from tests.unit.api.scripted_engine import ScriptedEngine, Step, ended, finished
from vlm_server.protocol import ImagePart, Message, TextPart

NULL = {"type": "null"}
STRING = {"type": "string"}
NUMBER = {"type": "number"}
COUNT = {"type": "integer", "minimum": 0}
BOOLEAN = {"type": "boolean"}


def required(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields)}


def nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, NULL]}


def listed(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


STATUS = {"enum": ["in_progress", "completed", "incomplete"]}
TEXT = required(
    type={"const": "output_text"}, text=STRING, annotations=listed({}), logprobs=listed({})
)
THOUGHT = required(type={"const": "reasoning_text"}, text=STRING)
ITEM = {
    "oneOf": [
        required(
            type={"const": "message"},
            id=STRING,
            status=STATUS,
            role={"const": "assistant"},
            content=listed(TEXT),
        ),
        required(
            type={"const": "function_call"},
            id=STRING,
            call_id=STRING,
            name=STRING,
            arguments=STRING,
            status=STATUS,
        ),
        required(
            type={"const": "reasoning"}, id=STRING, summary=listed({}), content=listed(THOUGHT)
        ),
    ]
}
TOOL = required(
    type={"const": "function"},
    name=STRING,
    description=nullable(STRING),
    parameters=nullable({"type": "object"}),
    strict=nullable(BOOLEAN),
)
RESPONSE = required(
    id=STRING,
    object={"const": "response"},
    created_at=COUNT,
    completed_at=nullable(COUNT),
    status=STRING,
    incomplete_details=nullable(required(reason=STRING)),
    model=STRING,
    previous_response_id=nullable(STRING),
    instructions=nullable(STRING),
    output=listed(ITEM),
    error=nullable(required(code=STRING, message=STRING)),
    tools=listed(TOOL),
    tool_choice={},
    truncation={"enum": ["auto", "disabled"]},
    parallel_tool_calls=BOOLEAN,
    text=required(format=required(type=STRING)),
    top_p=NUMBER,
    presence_penalty=NUMBER,
    frequency_penalty=NUMBER,
    top_logprobs=COUNT,
    temperature=NUMBER,
    reasoning=nullable(required(effort=nullable(STRING), summary=nullable(STRING))),
    usage=nullable(
        required(
            input_tokens=COUNT,
            output_tokens=COUNT,
            total_tokens=COUNT,
            input_tokens_details=required(cached_tokens=COUNT),
            output_tokens_details=required(reasoning_tokens=COUNT),
        )
    ),
    max_output_tokens=nullable(COUNT),
    max_tool_calls=nullable(COUNT),
    store=BOOLEAN,
    background=BOOLEAN,
    service_tier=STRING,
    metadata={},
    safety_identifier=nullable(STRING),
    prompt_cache_key=nullable(STRING),
)

WEATHER = tool(
    "get_weather",
    description="The weather at a place.",
    parameters={
        "type": "object",
        "properties": {"location": {"type": "string"}},
        "required": ["location"],
    },
)
CALLING: tuple[Step, ...] = (
    *(
        calls(0, "call_1", "get_weather"),
        calls(0, arguments='{"location":'),
        calls(0, "", "", '"SF"}'),
    ),
    *(ended("tool_calls"), finished()),
)


async def responses_to(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The response to `body`, whole and streamed, each validated."""
    answer = await client.post(ROUTE, json=body)
    assert answer.status_code == 200, answer.text
    streamed = await client.post(ROUTE, json=body | {"stream": True})
    responses = [answer.json(), events(streamed.text)[-1]["response"]]
    for response in responses:
        jsonschema.validate(response, RESPONSE)
        assert response["status"] == "completed"
        assert response["output"]
    return responses


def events(stream: str) -> list[dict[str, Any]]:
    """The events of a stream; each name equals its data's type, and `[DONE]` ends the stream."""
    *blocks, done, rest = stream.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    decoded = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        decoded.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {decoded[-1]['type']}"
        assert decoded[-1]["sequence_number"] == number
    return decoded


async def test_open_responses_text_case(client: httpx.AsyncClient) -> None:
    message = {"type": "message", "role": "user", "content": "Say hello."}
    for response in await responses_to(client, asking([message])):
        assert response["output"][0]["content"][0]["text"] == "Hello world"


async def test_open_responses_stream_case(client: httpx.AsyncClient) -> None:
    answer = await client.post(ROUTE, json=asking([user("Count.")], stream=True))
    assert answer.headers["content-type"].startswith("text/event-stream")
    pieces = [event["delta"] for event in events(answer.text) if event["type"].endswith(".delta")]
    assert pieces == ["Hello", " world"]


async def test_open_responses_system_prompt_case(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    system = {"type": "message", "role": "system", "content": "You are a pirate."}
    await responses_to(client, asking([system, user("Say hello.")]))
    assert engine.submitted[0].messages[0] == Message("system", (TextPart("You are a pirate."),))


async def test_open_responses_tool_call_case(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = CALLING
    for response in await responses_to(client, asking([user("Weather?")], tools=[WEATHER])):
        (call,) = response["output"]
        assert call["type"] == "function_call"
        assert json.loads(call["arguments"]) == {"location": "SF"}


async def test_open_responses_streamed_tool_call_case(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = CALLING
    wanted = asking([user("Weather?")], tools=[WEATHER], stream=True)
    stream = events((await client.post(ROUTE, json=wanted)).text)
    kinds = [event["type"].removeprefix("response.") for event in stream]
    assert kinds[2:-1] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert stream[2]["item"]["type"] == stream[-2]["item"]["type"] == "function_call"
    assert stream[2]["item"]["arguments"] == ""
    assert stream[-3]["arguments"] == stream[-2]["item"]["arguments"]


async def test_open_responses_image_case(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    text = {"type": "input_text", "text": "What is this?"}
    image = {"type": "input_image", "image_url": PNG_URL}
    await responses_to(client, asking([user(text, image)]))
    assert engine.submitted[0].messages[0].content[1] == ImagePart(0)


async def test_open_responses_multi_turn_case(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    turns = [
        user("My name is Alice."),
        {"type": "message", "role": "assistant", "content": "Hello Alice!"},
        user("What is my name?"),
    ]
    await responses_to(client, asking(turns))
    assert [message.role for message in engine.submitted[0].messages] == [
        "user",
        "assistant",
        "user",
    ]


async def test_assistant_phases_are_kept_in_input_items(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    turns = [
        user("Look it up."),
        {"type": "message", "role": "assistant", "content": "I look.", "phase": "commentary"},
        {"type": "message", "role": "assistant", "content": "Found.", "phase": "final_answer"},
        user("Thanks."),
    ]
    (response, _) = await responses_to(client, asking(turns))
    shown = await client.get(f"{ROUTE}/{response['id']}/input_items", params={"order": "asc"})
    assert [item.get("phase") for item in shown.json()["data"]] == [
        None,
        "commentary",
        "final_answer",
        None,
    ]


async def test_reasoning_and_calls_have_specified_shape(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = AGENT
    for response in await responses_to(client, asking(tools=[tool("click")])):
        assert [item["type"] for item in response["output"]] == [
            "reasoning",
            "message",
            "function_call",
            "function_call",
        ]


@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_empty_response_is_empty_message(
    client: httpx.AsyncClient, engine: ScriptedEngine, reason: Any
) -> None:
    engine.script = (ended(reason), finished())
    response = (await client.post(ROUTE, json=asking())).json()
    jsonschema.validate(response, RESPONSE)
    assert response["output"][0]["content"][0]["text"] == ""
