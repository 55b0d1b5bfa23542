"""Ollama's client against the real daemon.

Parallel calls, reasoning and failures are in tests/unit/api/dialects/ollama."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ollama
import pytest

from tests.clients.conftest import Abandons
from tests.clients.screen import (
    CIRCLE,
    CLICK,
    COLOUR,
    COUNT,
    DESCRIBE,
    LOOK,
    TOO_LONG,
    ShapeOnScreen,
    is_at,
    is_the_circle,
    screenshot,
)
from tests.support.daemons import Daemon

PNG = screenshot()
GREEDY: Any = {"model": "demo", "options": {"temperature": 0, "num_predict": 400}}

Connect = Callable[..., ollama.Client]


def user(content: str, *images: bytes) -> dict[str, Any]:
    return {"role": "user", "content": content, "images": list(images)}


def look() -> bytes:
    """What is on the screen."""
    return PNG


def click(x: int, y: int) -> str:
    """Click at a point.

    Args:
        x: From 0 at the left to 1000
        y: From 0 at the top to 1000
    """
    return f"clicked at {x}, {y}"


look.__name__ = "screenshot"
TOOLS: Any = [look, click]


@pytest.fixture
def connect(daemon: Daemon) -> Connect:
    def connected_client(api_key: str = daemon.api_key) -> ollama.Client:
        return ollama.Client(daemon.url, headers={"Authorization": f"Bearer {api_key}"})

    return connected_client


@pytest.fixture
def client(connect: Connect) -> ollama.Client:
    return connect()


def test_ollama_show_lists_vision_and_tools(client: ollama.Client) -> None:
    assert {"vision", "tools"} <= set(client.show("demo").capabilities or ())


def test_ollama_client_answers_image(client: ollama.Client) -> None:
    assert client.chat(messages=[user(COLOUR, PNG)], **GREEDY).message.content == "red"
    assert client.generate(prompt=COLOUR, images=[PNG], **GREEDY).response == "red"


@pytest.mark.parametrize("streams", [False, True])
def test_ollama_tool_loop_reads_screenshot_result(client: ollama.Client, streams: bool) -> None:
    messages: list[Any] = [user(LOOK)]
    fields: Any = {**GREEDY, "messages": messages, "tools": TOOLS}
    if streams:
        parts = client.chat(**fields, stream=True)
        (reply,) = (part.message for part in parts if part.message.tool_calls)
    else:
        reply = client.chat(**fields).message
    (call,) = reply.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("screenshot", {})
    messages += [
        reply,
        {"role": "tool", "tool_name": "screenshot", "content": "", "images": [look()]},
    ]
    assert client.chat(**fields).message.content == "red"


def test_ollama_client_clicks_circle(client: ollama.Client) -> None:
    reply = client.chat(messages=[user(CLICK, PNG)], tools=[click], **GREEDY).message
    (call,) = reply.tool_calls or ()
    assert call.function.name == "click"
    assert is_at(CIRCLE, **call.function.arguments)


def test_ollama_client_gets_structured_output(client: ollama.Client) -> None:
    schema = ShapeOnScreen.model_json_schema()
    answer = client.chat(messages=[user(DESCRIBE, PNG)], format=schema, **GREEDY)
    thing = ShapeOnScreen.model_validate_json(answer.message.content or "")
    assert is_the_circle(thing)
    generated = client.generate(prompt=DESCRIBE, images=[PNG], format=schema, **GREEDY)
    assert ShapeOnScreen.model_validate_json(generated.response) == thing


def test_ollama_stream_ends_with_done_reason_and_count(client: ollama.Client) -> None:
    fields: Any = {**GREEDY, "options": {"temperature": 0, "num_predict": 40}}
    parts = list(client.chat(messages=[user(COUNT)], stream=True, **fields))
    assert len(parts) > 10
    assert "".join(part.message.content or "" for part in parts).startswith("1, 2, 3, 4")
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("length", 40)


def test_closed_ollama_stream_is_aborted(client: ollama.Client, abandons: Abandons) -> None:
    with abandons:
        stream: Any = client.chat(messages=[user(COUNT)], stream=True, **GREEDY)
        next(stream)
        stream.close()


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"model": "llava"}, 404, "not found"),
        ({"options": {"temperature": 9}}, 400, "temperature"),
        ({"messages": [user("What?", b"GIF")]}, 400, "image"),
        ({"messages": [user(TOO_LONG)]}, 400, "tokens"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_ollama_client_raises_errors_with_status(
    client: ollama.Client, fields: Any, status: int, words: str, streams: bool
) -> None:
    fields = {**GREEDY, "messages": [user("Hi")], **fields}
    with pytest.raises(ollama.ResponseError, match=words) as caught:
        list(client.chat(**fields, stream=streams))
    assert caught.value.status_code == status


def test_ollama_client_raises_errors_of_keys(connect: Connect, crowded: str) -> None:
    for key, status in (("another", 401), (crowded, 429)):
        with pytest.raises(ollama.ResponseError) as caught:
            connect(key).chat(messages=[user("Hi")], **GREEDY)
        assert caught.value.status_code == status
