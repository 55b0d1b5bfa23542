"""LiteLLM in three dialects, against the real daemon and a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.clients.chat import TOOLS, user
from tests.clients.conftest import Abandons
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
from tests.unit.api.scripted_engine import HELLO, ScriptedEngine, calls, ended, finished, thinks
from vlm_server.protocol import ImagePart, TextPart

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it reads one from the network
    import litellm

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{words}:UserWarning")
    for words in ("Pydantic serializer warnings", "Item 'summary' on TypedDict")
]  # of its own classes

IMAGE: Any = {"type": "image_url", "image_url": {"url": URL}}
PROVIDERS = ["openai", "anthropic", "ollama_chat"]


def ask(daemon: Daemon, provider: str, *messages: Any, model: str = "demo", **fields: Any) -> Any:
    fields = {"api_key": daemon.api_key, "temperature": 0, "max_tokens": 400, **fields}
    base = f"{daemon.url}/v1" if provider == "openai" else daemon.url
    return litellm.completion(
        f"{provider}/{model}", list(messages), api_base=base, num_retries=0, max_retries=0, **fields
    )


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_answers_image_with_usage(daemon: Daemon, provider: str) -> None:
    answer = ask(daemon, provider, user(IMAGE, COLOUR))
    assert answer.choices[0].message.content == "red"
    assert answer.usage.completion_tokens < 10 < answer.usage.prompt_tokens


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("streams", [False, True])
def test_litellm_tool_loop_reads_screenshot_result(
    daemon: Daemon, provider: str, streams: bool
) -> None:
    """LiteLLM adds text to such turns, so the question is repeated."""
    answer = ask(daemon, provider, user(LOOK), tools=TOOLS, stream=streams)
    if streams:
        answer = litellm.stream_chunk_builder(list(answer))
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("screenshot", {})
    result = {"role": "tool", "tool_call_id": call.id, "content": [IMAGE]}
    turns = (user(LOOK), choice.message, result, user("Where is the star?"))
    second = ask(daemon, provider, *turns, tools=TOOLS)
    assert second.choices[0].message.content == "bottom right"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_clicks_circle(daemon: Daemon, provider: str) -> None:
    answer = ask(daemon, provider, user(IMAGE, CLICK), tools=[TOOLS[1]])
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "click"
    assert is_at(CIRCLE, **json.loads(call.function.arguments))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_gets_structured_output(daemon: Daemon, provider: str) -> None:
    answer = ask(daemon, provider, user(IMAGE, DESCRIBE), response_format=ShapeOnScreen)
    assert is_the_circle(ShapeOnScreen.model_validate_json(answer.choices[0].message.content))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_streams_answer_in_pieces(daemon: Daemon, provider: str) -> None:
    chunks = ask(daemon, provider, user(COUNT), max_tokens=40, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert len(pieces) > 10
    assert "".join(pieces).startswith("1, 2, 3, 4")


async def test_closed_litellm_stream_is_aborted(daemon: Daemon, abandons: Abandons) -> None:
    async with abandons:
        stream = await litellm.acompletion(
            "openai/demo",
            [user(COUNT)],
            api_base=f"{daemon.url}/v1",
            api_key=daemon.api_key,
            stream=True,
        )
        await anext(stream)
        await stream.aclose()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_raises_its_typed_errors(daemon: Daemon, provider: str, crowded: str) -> None:
    with pytest.raises(litellm.NotFoundError):
        ask(daemon, provider, user("Hi"), model="gpt-4o")
    with pytest.raises(litellm.BadRequestError):
        ask(daemon, provider, user("Hi"), temperature=9)
    with pytest.raises(litellm.AuthenticationError):
        ask(daemon, provider, user("Hi"), api_key="another")
    with pytest.raises(litellm.RateLimitError):
        ask(daemon, provider, user("Hi"), api_key=crowded)


@pytest.mark.parametrize("times", [1, 20])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm_raises_context_window_exceeded(
    daemon: Daemon, provider: str, streams: bool, times: int
) -> None:
    """Not for Ollama, where LiteLLM has no such error. The longer prompt is not even tokenized."""
    with pytest.raises(litellm.ContextWindowExceededError):
        list(ask(daemon, provider, user(TOO_LONG * times), stream=streams))


# ---- answers of a scripted engine --------------------------------------------------------

LOOKS_AND_CLICKS = (
    *(thinks("Look"), thinks(" and click.")),
    *(calls(0, id="call_a", name="screenshot"), calls(0, "{}")),
    *(calls(1, id="call_b", name="click"), calls(1, '{"x": 3,'), calls(1, ' "y": 4}')),
    *(ended("tool_calls"), finished()),
)


async def ask_scripted(scripted: str, provider: str, *messages: Any, **fields: Any) -> Any:
    """Ask on a thread, since LiteLLM blocks the event loop for Ollama's models."""
    base = f"{scripted}/v1" if provider == "openai" else scripted
    fields = {"api_base": base, "api_key": "none", "tools": TOOLS, "num_retries": 0, **fields}

    def work() -> Any:
        answer = litellm.completion(f"{provider}/demo", list(messages), **fields)
        return litellm.stream_chunk_builder(list(answer)) if fields.get("stream") else answer

    return await asyncio.to_thread(work)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
async def test_litellm_reads_reasoning_and_parallel_calls(
    scripted: str, engine: ScriptedEngine, provider: str, streams: bool
) -> None:
    engine.script = LOOKS_AND_CLICKS
    answer = await ask_scripted(scripted, provider, user(LOOK), stream=streams)
    message = answer.choices[0].message
    assert message.reasoning_content == "Look and click."
    assert [
        (call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls
    ] == [
        ("screenshot", {}),
        ("click", {"x": 3, "y": 4}),
    ]
    engine.script = HELLO
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in message.tool_calls
    ]
    await ask_scripted(scripted, provider, user(LOOK), message, *results)
    _, turn, *results_sent = engine.submitted[1].messages
    assert [(call.name, json.loads(call.arguments)) for call in turn.tool_calls] == [
        ("screenshot", {}),
        ("click", {"x": 3, "y": 4}),
    ]
    assert turn.reasoning == "Look and click."
    assert [(result.role, result.name, result.content) for result in results_sent] == [
        ("tool", "screenshot", (TextPart("ok"),)),
        ("tool", "click", (TextPart("ok"),)),
    ]


@pytest.mark.parametrize(
    ("provider", "role"), [("openai", "user"), ("anthropic", "tool"), ("ollama_chat", "tool")]
)
async def test_litellm_sends_result_images_in_expected_role(
    scripted: str, engine: ScriptedEngine, provider: str, role: str
) -> None:
    function = {"name": "screenshot", "arguments": "{}"}
    called: dict[str, Any] = {"role": "assistant", "content": None}
    called["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
    shown = {"role": "tool", "tool_call_id": "call_1", "content": [IMAGE]}
    await ask_scripted(scripted, provider, user(LOOK), called, shown)
    (submit,) = engine.submitted
    (shower,) = [message for message in submit.messages if ImagePart(0) in message.content]
    assert shower.role == role


@pytest.mark.parametrize(
    ("provider", "expected"),
    [
        ("openai", litellm.ServiceUnavailableError),
        ("anthropic", litellm.InternalServerError),
        ("ollama_chat", litellm.ServiceUnavailableError),
    ],
)
async def test_litellm_raises_server_error_while_engine_restarts(
    scripted: str, engine: ScriptedEngine, provider: str, expected: type[Exception]
) -> None:
    engine.be("restarting")
    with pytest.raises(expected):
        await ask_scripted(scripted, provider, user("Hi"), max_retries=0)
