"""LiteLLM, which speaks three of the dialects, against the real daemon and a scripted engine."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

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
    Thing,
    is_at,
    is_the_circle,
    screenshot,
)
from tests.e2e.daemon import Daemon
from tests.unit.api.scripted_engine import HELLO, ScriptedEngine, calls, ended, finished, thinks
from tests.unit.api.scripted_engine import text as says
from vlm_server.protocol import ImagePart, Message, TextPart, ToolCall

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it reads one from the network
    import litellm

URL = f"data:image/png;base64,{base64.b64encode(screenshot()).decode()}"
PICTURE: Any = {"type": "image_url", "image_url": {"url": URL}}
PROVIDERS = ["openai", "anthropic", "ollama_chat"]


def user(*content: Any) -> Any:
    parts = [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]
    return {"role": "user", "content": parts}


def tool(name: str, parameters: dict[str, Any]) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("screenshot", NOTHING), tool("click", POINT)]


def ask(daemon: Daemon, provider: str, *messages: Any, model: str = "demo", **fields: Any) -> Any:
    fields = {"api_key": daemon.api_key, "temperature": 0, "max_tokens": 400, **fields}
    base = f"{daemon.url}/v1" if provider == "openai" else daemon.url
    return litellm.completion(
        f"{provider}/{model}", list(messages), api_base=base, num_retries=0, max_retries=0, **fields
    )


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_question_about_a_picture(daemon: Daemon, provider: str) -> None:
    answer = ask(daemon, provider, user(PICTURE, COLOUR))
    assert answer.choices[0].message.content == "red"
    assert answer.usage.completion_tokens < 10 < answer.usage.prompt_tokens


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_loop_with_a_screenshot_in_the_result(
    daemon: Daemon, provider: str, streams: bool
) -> None:
    answer = ask(daemon, provider, user(LOOK), tools=TOOLS, stream=streams)
    if streams:
        answer = litellm.stream_chunk_builder(list(answer))
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("screenshot", {})
    result = {"role": "tool", "tool_call_id": call.id, "content": [PICTURE]}
    second = ask(daemon, provider, user(LOOK), choice.message, result, tools=TOOLS)
    assert second.choices[0].message.content == "red"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_click(daemon: Daemon, provider: str) -> None:
    answer = ask(daemon, provider, user(PICTURE, CLICK), tools=[TOOLS[1]])
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "click"
    assert is_at(CIRCLE, **json.loads(call.function.arguments))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_structured_output(daemon: Daemon, provider: str) -> None:
    answer = ask(daemon, provider, user(PICTURE, DESCRIBE), response_format=Thing)
    assert is_the_circle(Thing.model_validate_json(answer.choices[0].message.content))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_stream(daemon: Daemon, provider: str) -> None:
    chunks = ask(daemon, provider, user(COUNT), max_tokens=40, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert len(pieces) > 10
    assert "".join(pieces).startswith("1, 2, 3, 4")


async def test_a_stream_that_is_closed_is_abandoned(daemon: Daemon, abandons: Abandons) -> None:
    async def leave() -> None:
        stream = await litellm.acompletion(
            "openai/demo",
            [user(COUNT)],
            api_base=f"{daemon.url}/v1",
            api_key=daemon.api_key,
            stream=True,
        )
        await anext(stream)
        await stream.aclose()

    with abandons():
        await leave()
        await asyncio.sleep(0)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_errors(daemon: Daemon, provider: str, crowded: str) -> None:
    with pytest.raises(litellm.NotFoundError):
        ask(daemon, provider, user("Hi"), model="gpt-4o")
    with pytest.raises(litellm.BadRequestError):
        ask(daemon, provider, user("Hi"), temperature=9)
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(daemon, provider, user(TOO_LONG))
    with pytest.raises(litellm.AuthenticationError):
        ask(daemon, provider, user("Hi"), api_key="another")
    with pytest.raises(litellm.RateLimitError):
        ask(daemon, provider, user("Hi"), api_key=crowded)
