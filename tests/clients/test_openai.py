"""OpenAI's client with chat completions, responses and helpers, against the real daemon.

Parallel calls, reasoning and failures are in tests/unit/api/dialects."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.clients.chat import TOOLS, user
from tests.clients.conftest import ENDLESS, Abandons
from tests.clients.screen import (
    CIRCLE,
    CLICK,
    COLOUR,
    COUNT,
    DESCRIBE,
    LOOK,
    TOO_LONG,
    URL,
    ShapeOnScreen,
    is_at,
    is_the_circle,
)
from tests.support.daemons import Daemon

IMAGE: Any = {"type": "image_url", "image_url": {"url": URL}}
GREEDY: Any = {"model": "demo", "temperature": 0}


@pytest.fixture
def client(daemon: Daemon) -> openai.OpenAI:
    return daemon.client()


# ---- chat completions --------------------------------------------------------------------


def test_openai_chat_answers_image(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=[user(IMAGE, COLOUR)], **GREEDY)
    assert answer.choices[0].message.content == "red"


@pytest.mark.parametrize("streams", [False, True])
def test_openai_tool_loop_reads_screenshot_result(client: openai.OpenAI, streams: bool) -> None:
    messages = [user(LOOK)]
    fields = {**GREEDY, "messages": messages, "tools": TOOLS}
    if streams:
        with client.chat.completions.stream(**fields) as stream:
            (choice,) = stream.get_final_completion().choices
    else:
        (choice,) = client.chat.completions.create(**fields).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("screenshot", "{}")

    messages += [
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": [IMAGE]},
    ]
    answer = client.chat.completions.create(**fields)
    assert answer.choices[0].message.content == "red"


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "click"}}]
)
def test_openai_client_clicks_circle(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        messages=[user(IMAGE, CLICK)], tools=[TOOLS[1]], tool_choice=choice, **GREEDY
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "click"
    assert is_at(CIRCLE, **json.loads(call.function.arguments))


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_openai_client_parses_arguments_into_class(client: openai.OpenAI, choice: Any) -> None:
    """The class becomes a strict tool."""
    answer = client.chat.completions.parse(
        messages=[user(IMAGE, "Call report for the circle.")],
        tools=[openai.pydantic_function_tool(ShapeOnScreen, name="report")],
        tool_choice=choice,
        parallel_tool_calls=False,
        **GREEDY,
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    thing = call.function.parsed_arguments
    assert isinstance(thing, ShapeOnScreen)
    assert is_the_circle(thing)


@pytest.mark.parametrize("streams", [False, True])
def test_openai_client_parses_structured_output(client: openai.OpenAI, streams: bool) -> None:
    fields = {**GREEDY, "messages": [user(IMAGE, DESCRIBE)], "response_format": ShapeOnScreen}
    if streams:
        with client.chat.completions.stream(**fields) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.parse(**fields).choices[0].message
    assert is_the_circle(message.parsed)


def test_openai_stream_arrives_in_pieces(client: openai.OpenAI) -> None:
    fields: Any = {**GREEDY, "messages": [user(COUNT)], "max_tokens": 40}
    with client.chat.completions.stream(**fields) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
    assert len(pieces) > 10
    assert "".join(pieces).startswith("1, 2, 3, 4")


def test_closed_openai_stream_is_aborted(client: openai.OpenAI, abandons: Abandons) -> None:
    with (
        abandons,
        client.chat.completions.create(
            model="demo", messages=[user(COUNT)], stream=True, **ENDLESS
        ) as stream,
    ):
        next(stream)


def test_timed_out_openai_client_is_aborted(daemon: Daemon, abandons: Abandons) -> None:
    with abandons, pytest.raises(openai.APITimeoutError):
        daemon.client(timeout=0.5).chat.completions.create(
            model="demo", messages=[user(COUNT)], **ENDLESS
        )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model": "gpt-4o"}, openai.NotFoundError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"messages": [user({**IMAGE, "image_url": {"url": "x.png"}})]}, openai.BadRequestError),
    ],
)
def test_openai_client_raises_typed_errors(
    client: openai.OpenAI, fields: Any, expected: type[openai.APIStatusError]
) -> None:
    fields = {**GREEDY, "messages": [user("Hi")], **fields}
    with pytest.raises(expected):
        client.chat.completions.create(**fields)


def test_openai_long_prompt_has_context_length_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tokens") as caught:
        client.chat.completions.create(messages=[user(TOO_LONG)], **GREEDY)
    assert caught.value.code == "context_length_exceeded"
    assert "8192" in caught.value.message


def test_openai_wrong_key_is_authentication_error(daemon: Daemon) -> None:
    with pytest.raises(openai.AuthenticationError):
        daemon.client(api_key="another").chat.completions.create(messages=[user("Hi")], **GREEDY)


def test_openai_crowded_key_is_rate_limit_error(daemon: Daemon, crowded: str) -> None:
    with pytest.raises(openai.RateLimitError) as caught:
        daemon.client(api_key=crowded).chat.completions.create(messages=[user("Hi")], **GREEDY)
    assert int(caught.value.response.headers["retry-after"]) >= 1


# ---- responses ---------------------------------------------------------------------------

SHOWN: Any = {"type": "input_image", "image_url": URL, "detail": "auto"}
FUNCTIONS: Any = [{"type": "function", "strict": False, **each["function"]} for each in TOOLS]


def input_message(*content: Any) -> Any:
    parts = [
        {"type": "input_text", "text": part} if isinstance(part, str) else part for part in content
    ]
    return [{"role": "user", "content": parts}]


def test_openai_response_answers_image(client: openai.OpenAI) -> None:
    response = client.responses.create(input=input_message(SHOWN, COLOUR), **GREEDY)
    assert response.output_text == "red"


@pytest.mark.parametrize("is_stored", [False, True])
def test_openai_responses_tool_loop_reads_screenshot(
    client: openai.OpenAI, is_stored: bool
) -> None:
    fields = {**GREEDY, "tools": FUNCTIONS, "store": is_stored}
    first = client.responses.create(input=LOOK, **fields)
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("screenshot", "{}")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": [SHOWN]}
    if is_stored:
        second = client.responses.create(input=[result], previous_response_id=first.id, **fields)
    else:
        second = client.responses.create(input=[*input_message(LOOK), call, result], **fields)
    assert second.output_text == "red"


def test_openai_client_parses_structured_response(client: openai.OpenAI) -> None:
    response = client.responses.parse(
        input=input_message(SHOWN, DESCRIBE), text_format=ShapeOnScreen, **GREEDY
    )
    assert response.output_parsed is not None
    assert is_the_circle(response.output_parsed)


def test_openai_response_stream_arrives_in_pieces(client: openai.OpenAI) -> None:
    with client.responses.stream(input="Count from 1 to 10.", **GREEDY) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert len(pieces) > 10
    assert "".join(pieces) == final.output_text
    assert final.output_text.startswith("1, 2, 3, 4")


def test_closed_openai_response_stream_is_aborted(
    client: openai.OpenAI, abandons: Abandons
) -> None:
    with (
        abandons,
        client.responses.create(model="demo", input=COUNT, stream=True) as stream,
    ):
        next(iter(stream))


def test_openai_responses_raise_typed_errors(
    daemon: Daemon, client: openai.OpenAI, crowded: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input=TOO_LONG, **GREEDY)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-4o", input="Hi")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_none")
    for key, expected in (("other", openai.AuthenticationError), (crowded, openai.RateLimitError)):
        with pytest.raises(expected):
            daemon.client(api_key=key).responses.create(input="Hi", **GREEDY)
