"""Anthropic's client and its helpers against the real daemon.

Parallel calls, reasoning and failures are in tests/unit/api/dialects/anthropic."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import anthropic
import pytest

from tests.clients.conftest import Abandons
from tests.clients.screen import (
    CIRCLE,
    CLICK,
    COLOUR,
    COUNT,
    DESCRIBE,
    LOOK,
    NOTHING,
    POINT,
    TOO_LONG,
    ShapeOnScreen,
    is_at,
    is_the_circle,
    screenshot,
)
from tests.support.daemons import Daemon

IMAGE: Any = {
    "type": "image",
    "source": {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(screenshot()).decode(),
    },
}
TOOLS: Any = [
    {"name": "screenshot", "input_schema": NOTHING},
    {"name": "click", "input_schema": POINT},
]
GREEDY: Any = {"model": "demo", "max_tokens": 400, "extra_body": {"temperature": 0}}

Connect = Callable[..., anthropic.Anthropic]


def user(*content: Any) -> Any:
    blocks = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"role": "user", "content": blocks}


@pytest.fixture
def connect(daemon: Daemon) -> Connect:
    def connected_client(api_key: str = daemon.api_key) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=daemon.url, api_key=api_key, max_retries=0)

    return connected_client


@pytest.fixture
def client(connect: Connect) -> anthropic.Anthropic:
    return connect()


def test_anthropic_client_answers_image_and_counts_its_tokens(
    client: anthropic.Anthropic,
) -> None:
    message = client.messages.create(messages=[user(IMAGE, COLOUR)], **GREEDY)
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "red"}]
    counted = client.messages.count_tokens(model="demo", messages=[user(IMAGE, COLOUR)])
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert message._request_id


@pytest.mark.parametrize("streams", [False, True])
def test_anthropic_tool_loop_reads_screenshot_result(
    client: anthropic.Anthropic, streams: bool
) -> None:
    messages = [user(LOOK)]
    fields: Any = {**GREEDY, "messages": messages, "tools": TOOLS}
    if streams:
        with client.messages.stream(**fields) as stream:
            message: Any = stream.get_final_message()
    else:
        message = client.messages.create(**fields)
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert (call.type, call.name, call.input) == ("tool_use", "screenshot", {})

    result = {"type": "tool_result", "tool_use_id": call.id, "content": [IMAGE]}
    messages += [{"role": "assistant", "content": message.content}, user(result)]
    answer = client.messages.create(**fields)
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "red"}]


def test_anthropic_tool_runner_reads_screenshot(client: anthropic.Anthropic) -> None:
    shown = []

    @anthropic.beta_tool(name="screenshot")
    def look() -> Any:
        """What is on the screen."""
        shown.append(IMAGE)
        return shown

    runner = client.beta.messages.tool_runner(tools=[look], messages=[user(LOOK)], **GREEDY)
    (block,) = runner.until_done().content
    assert block.type == "text"
    assert (block.text, len(shown)) == ("red", 1)


@pytest.mark.parametrize(
    "choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "click"}]
)
def test_anthropic_client_clicks_circle(client: anthropic.Anthropic, choice: Any) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    message = client.messages.create(
        messages=[user(IMAGE, CLICK)], tools=[TOOLS[1]], tool_choice=choice, **GREEDY
    )
    (call,) = message.content
    assert call.type == "tool_use"
    assert call.name == "click"
    assert is_at(CIRCLE, **call.input)


def test_anthropic_client_parses_structured_output(client: anthropic.Anthropic) -> None:
    fields: Any = {**GREEDY, "messages": [user(IMAGE, DESCRIBE)], "output_format": ShapeOnScreen}
    message = client.messages.parse(**fields)
    assert message.parsed_output is not None
    assert is_the_circle(message.parsed_output)
    with client.messages.stream(**fields) as stream:
        assert stream.get_final_message().parsed_output == message.parsed_output


def test_anthropic_stream_ends_at_max_tokens(client: anthropic.Anthropic) -> None:
    fields: Any = {**GREEDY, "max_tokens": 40}
    with client.messages.stream(messages=[user(COUNT)], **fields) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 10
    assert "".join(pieces).startswith("1, 2, 3, 4")
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 40)


def test_closed_anthropic_stream_is_aborted(
    client: anthropic.Anthropic, abandons: Abandons
) -> None:
    with abandons, client.messages.stream(messages=[user(COUNT)], **GREEDY) as stream:
        next(stream.text_stream)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model": "claude"}, anthropic.NotFoundError),
        ({"extra_body": {"temperature": 9}}, anthropic.BadRequestError),
        ({"messages": [user({"type": "document", "source": {}})]}, anthropic.BadRequestError),
        ({"messages": [user(TOO_LONG)]}, anthropic.BadRequestError),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_anthropic_client_raises_errors_with_request_ids(
    client: anthropic.Anthropic,
    fields: Any,
    expected: type[anthropic.APIStatusError],
    streams: bool,
) -> None:
    fields = {**GREEDY, "messages": [user("Hi")], **fields}
    with pytest.raises(expected) as caught:
        client.messages.create(**fields, stream=streams)
    assert caught.value.type in ("invalid_request_error", "not_found_error")
    assert caught.value.request_id
    if fields["messages"] == [user(TOO_LONG)]:
        assert "prompt is too long" in caught.value.message


def test_anthropic_client_raises_errors_of_keys(connect: Connect, crowded: str) -> None:
    errors = {"another": anthropic.AuthenticationError, crowded: anthropic.RateLimitError}
    for key, expected in errors.items():
        with pytest.raises(expected):
            connect(key).messages.create(messages=[user("Hi")], **GREEDY)
