"""LangChain's `ChatOpenAI` through both of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

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
from tests.unit.api.scripted_engine import text as says
from vlm_server.protocol import ImagePart, Message, TextPart, ToolCall

IMAGE: Any = {"type": "image_url", "image_url": {"url": URL}}
METHODS: Any = ["json_schema", "json_mode", "function_calling"]

Connect = Callable[..., ChatOpenAI]


@tool
def screenshot() -> list[Any]:
    """What is on the screen."""
    return [IMAGE]


@tool
def click(x: int, y: int) -> str:
    """Click at a point."""
    return f"clicked at {x}, {y}"


def user(*content: Any, **fields: Any) -> HumanMessage:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return HumanMessage(parts, **fields)


@pytest.fixture
def connect(daemon: Daemon) -> Connect:
    def connected_client(
        api_key: str = daemon.api_key, model: str = "demo", **fields: Any
    ) -> ChatOpenAI:
        return ChatOpenAI(
            model=model,
            base_url=f"{daemon.url}/v1",
            api_key=SecretStr(api_key),
            max_retries=0,
            **{"temperature": 0, "max_tokens": 400, **fields},
        )

    return connected_client


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(connect: Connect, request: pytest.FixtureRequest) -> ChatOpenAI:
    return connect(use_responses_api=request.param)


def test_langchain_answers_image_with_usage(model: ChatOpenAI) -> None:
    answer = model.invoke([user(IMAGE, COLOUR, name="supervisor")])
    assert answer.text == "red"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] > 100


@pytest.mark.parametrize("streams", [False, True])
def test_langchain_tool_loop_reads_screenshot_result(model: ChatOpenAI, streams: bool) -> None:
    bound = model.bind_tools([screenshot, click])
    messages: list[Any] = [user(LOOK)]
    if streams:
        first, *others = bound.stream(messages)
        reply: Any = sum(others, first)
    else:
        reply = bound.invoke(messages)
    (call,) = reply.tool_calls
    assert (call["name"], call["args"]) == ("screenshot", {})
    result = screenshot.invoke(call)
    assert isinstance(result, ToolMessage)
    assert bound.invoke([*messages, reply, result]).text == "red"


@pytest.mark.parametrize("choice", ["auto", "any", "click"])
def test_langchain_clicks_circle(model: ChatOpenAI, choice: str) -> None:
    reply = model.bind_tools([click], tool_choice=choice).invoke([user(IMAGE, CLICK)])
    assert isinstance(reply, AIMessage)
    (call,) = reply.tool_calls
    assert call["name"] == "click"
    assert is_at(CIRCLE, **call["args"])


@pytest.mark.parametrize("method", METHODS)
def test_langchain_parses_structured_output(model: ChatOpenAI, method: Any) -> None:
    """In JSON mode only the prompt says what the object must contain."""
    picky = model.with_structured_output(ShapeOnScreen, method=method, include_raw=True)
    found: Any = picky.invoke([user(IMAGE, DESCRIBE)])
    if method == "json_mode":
        assert found["raw"].text.startswith("{")
    else:
        assert found["parsing_error"] is None
        assert is_the_circle(found["parsed"])


def test_langchain_streams_answer_in_pieces(connect: Connect, model: ChatOpenAI) -> None:
    pieces = [piece.text for piece in model.stream("Count from 1 to 10.")]
    assert len(pieces) > 10
    assert "".join(pieces).startswith("1, 2, 3, 4")


async def test_closed_langchain_stream_is_aborted(model: ChatOpenAI, abandons: Abandons) -> None:
    async with abandons:
        stream = model.astream(COUNT)
        await anext(stream)
        await stream.aclose()


@pytest.mark.parametrize("streams", [False, True])
def test_langchain_raises_context_overflow_for_long_prompts(
    model: ChatOpenAI, streams: bool
) -> None:
    with pytest.raises(ContextOverflowError):
        list(model.stream(TOO_LONG)) if streams else model.invoke(TOO_LONG)


def test_langchain_raises_openais_errors(connect: Connect, crowded: str) -> None:
    wrong: dict[type[Exception], dict[str, Any]] = {
        openai.NotFoundError: {"model": "gpt-4o"},
        openai.BadRequestError: {"temperature": 9},
        openai.AuthenticationError: {"api_key": "another"},
        openai.RateLimitError: {"api_key": crowded},
    }
    for expected, fields in wrong.items():
        for uses_responses in (False, True):
            with pytest.raises(expected):
                connect(**fields, use_responses_api=uses_responses).invoke("Hi")


# ---- answers of a scripted engine --------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def scripted_model(scripted: str, request: pytest.FixtureRequest) -> ChatOpenAI:
    """A `ChatOpenAI` of the front with a scripted engine."""
    return ChatOpenAI(
        model="demo",
        base_url=f"{scripted}/v1",
        api_key=SecretStr("none"),
        max_retries=0,
        use_responses_api=request.param,
    )


@pytest.mark.parametrize("streams", [False, True])
async def test_langchain_reads_reasoning_and_parallel_calls(
    scripted_model: ChatOpenAI, engine: ScriptedEngine, streams: bool
) -> None:
    engine.script = (
        *(thinks("A button."), calls(0, "{}", id="call_1", name="screenshot")),
        *(calls(1, '{"x": 3,', id="call_2", name="click"), calls(1, ' "y": 4}')),
        *(ended("tool_calls"), finished()),
    )
    bound = scripted_model.bind_tools([screenshot, click], tool_choice="any")
    question = user("Click.", IMAGE)
    if streams:
        pieces = [piece async for piece in bound.astream([question])]
        reply: Any = sum(pieces[1:], pieces[0])
    else:
        reply = await bound.ainvoke([question])
    assert [(call["id"], call["name"], call["args"]) for call in reply.tool_calls] == [
        ("call_1", "screenshot", {}),
        ("call_2", "click", {"x": 3, "y": 4}),
    ]
    assert engine.submitted[0].tools is not None
    assert engine.submitted[0].tools.choice == "required"

    engine.script = HELLO
    shown = ToolMessage([{"type": "text", "text": "Now:"}, IMAGE], tool_call_id="call_1")
    result = ToolMessage("clicked", tool_call_id="call_2")
    answer = await scripted_model.bind_tools([screenshot, click]).ainvoke(
        [question, reply, shown, result]
    )
    assert answer.text == "Hello world"
    _, turn, first, second = engine.submitted[1].messages
    assert [(call.id, call.name) for call in turn.tool_calls] == [
        ("call_1", "screenshot"),
        ("call_2", "click"),
    ]
    assert turn.tool_calls[1] == ToolCall("call_2", "click", '{"x": 3, "y": 4}')
    assert first == Message(
        "tool", (TextPart("Now:"), ImagePart(1)), tool_call_id="call_1", name="screenshot"
    )
    assert second == Message("tool", (TextPart("clicked"),), tool_call_id="call_2", name="click")


@pytest.mark.parametrize("method", METHODS)
async def test_langchain_structured_output_reaches_engine(
    scripted_model: ChatOpenAI, engine: ScriptedEngine, method: Any
) -> None:
    thing = ShapeOnScreen(shape="star", color="blue", count=2, x=3, y=4)
    if method == "function_calling":
        call = calls(0, thing.model_dump_json(), id="call_1", name="ShapeOnScreen")
        engine.script = (call, ended("tool_calls"), finished())
    else:
        engine.script = (says(thing.model_dump_json()), ended(), finished())
    assert (
        await scripted_model.with_structured_output(ShapeOnScreen, method=method).ainvoke("Hi")
        == thing
    )
    (submit,) = engine.submitted
    if method == "function_calling":
        assert submit.tools is not None
        assert (submit.tools.choice, submit.tools.allowed) == ("required", ("ShapeOnScreen",))
    else:
        assert submit.sampling.json_schema is not None
        assert ("shape" in submit.sampling.json_schema) == (method == "json_schema")


async def test_langchain_raises_server_error_while_engine_restarts(
    scripted_model: ChatOpenAI, engine: ScriptedEngine
) -> None:
    engine.be("restarting")
    with pytest.raises(openai.InternalServerError):
        await scripted_model.ainvoke("Hi")
