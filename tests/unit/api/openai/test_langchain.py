"""LangChain's client through a real server: tools, structured output, thoughts in its stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.unit.api.conftest import listening
from tests.unit.api.requests import PNG_URL, picture, text
from tests.unit.api.scripted_engine import HELLO, ScriptedEngine, calls, ended, finished, thinks
from tests.unit.api.scripted_engine import text as says
from vlm_server.protocol import ImagePart, Message, TextPart, ToolCall

langchain_openai = pytest.importorskip("langchain_openai")
messages = pytest.importorskip("langchain_core.messages")

CLICK = {
    "title": "click",
    "description": "Click at a point.",
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
}
CALLS = (
    *(thinks("A button."), calls(0, '{"x": 3}', id="call_1", name="click")),
    *(ended("tool_calls"), finished()),
)


@pytest.fixture
async def model(engine: ScriptedEngine) -> AsyncIterator[Any]:
    async with listening(engine) as port:
        base_url = f"http://127.0.0.1:{port}/v1"
        yield langchain_openai.ChatOpenAI(
            model="demo", base_url=base_url, api_key="none", max_retries=0
        )


@pytest.mark.parametrize("streams", [False, True])
async def test_a_tool_loop_with_a_screenshot_in_the_result(
    model: Any, engine: ScriptedEngine, streams: bool
) -> None:
    engine.script = CALLS
    bound = model.bind_tools([CLICK], tool_choice="any")
    question = messages.HumanMessage([text("Click."), picture()], name="supervisor")
    if streams:
        pieces = [piece async for piece in bound.astream([question])]
        said = sum(pieces[1:], pieces[0])
    else:
        said = await bound.ainvoke([question])
    assert [(call["id"], call["name"], call["args"]) for call in said.tool_calls] == [
        ("call_1", "click", {"x": 3})
    ]
    assert engine.submitted[0].tools is not None
    assert engine.submitted[0].tools.choice == "required"

    engine.script = HELLO
    result = messages.ToolMessage([text("Now:"), picture()], tool_call_id="call_1")
    answer = await model.bind_tools([CLICK]).ainvoke([question, said, result])
    assert answer.content == "Hello world"
    _, call, shown = engine.submitted[1].messages
    assert call.tool_calls == (ToolCall("call_1", "click", '{"x": 3}'),)
    assert shown == Message(
        "tool", (TextPart("Now:"), ImagePart(1)), tool_call_id="call_1", name="click"
    )


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
async def test_structured_output(model: Any, engine: ScriptedEngine, method: str) -> None:
    if method == "function_calling":
        engine.script = CALLS
    else:
        engine.script = (says('{"x": 3}'), ended(), finished())
    picky = model.with_structured_output(CLICK, method=method)
    question = messages.HumanMessage([{"type": "image_url", "image_url": {"url": PNG_URL}}])
    assert await picky.ainvoke([question]) == {"x": 3}
    submit = engine.submitted[0]
    if method == "function_calling":
        assert submit.tools is not None
        assert (submit.tools.choice, submit.tools.allowed) == ("required", ("click",))
    else:
        assert submit.sampling.json_schema is not None
