"""pydantic-ai's agents through both of OpenAI's APIs. They make tools strict by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from openai import AsyncOpenAI
from pydantic_ai import Agent, BinaryContent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

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
from tests.unit.api.scripted_engine import HELLO, ScriptedEngine, calls, ended, finished, thinks
from tests.unit.api.scripted_engine import text as says
from vlm_server.protocol import ImagePart, TextPart

KINDS: Any = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}
IMAGE = BinaryContent(screenshot(), media_type="image/png")

Model = OpenAIChatModel | OpenAIResponsesModel
Connect = Callable[..., Model]


def new_model(url: str, kind: str, api_key: str, name: str = "demo", **settings: Any) -> Model:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0)
    wanted = ModelSettings(**{"temperature": 0, "max_tokens": 400, **settings})  # type: ignore[typeddict-item]
    model: Model = KINDS[kind](name, provider=OpenAIProvider(openai_client=client), settings=wanted)
    return model


@pytest.fixture(params=KINDS)
def connect(daemon: Daemon, request: pytest.FixtureRequest) -> Connect:
    def connected_client(
        api_key: str = daemon.api_key, name: str = "demo", **settings: Any
    ) -> Model:
        return new_model(daemon.url, request.param, api_key, name, **settings)

    return connected_client


@pytest.fixture
def model(connect: Connect) -> Model:
    return connect()


def agent_with_tools(model: Model) -> tuple[Agent[None, str], list[tuple[int, int]]]:
    """An agent with the screen's tools, and the list of its clicks."""
    agent, clicked = Agent(model), list[tuple[int, int]]()

    @agent.tool_plain(name="screenshot")
    def look() -> BinaryContent:
        return IMAGE

    @agent.tool_plain
    def click(x: int, y: int) -> str:
        clicked.append((x, y))
        return "ok"

    return agent, clicked


async def test_pydantic_ai_answers_image_with_usage(model: Model) -> None:
    result = await Agent(model).run([IMAGE, COLOUR])
    assert result.output == "red"
    assert result.usage.input_tokens > 100


async def test_pydantic_ai_tool_loop_reads_screenshot_result(model: Model) -> None:
    """In chats the image goes into a user message, among words that this model does not know."""
    result = await agent_with_tools(model)[0].run(LOOK)
    assert result.usage.tool_calls == 1
    assert result.output == "red" or isinstance(model, OpenAIChatModel)


async def test_pydantic_ai_clicks_circle(model: Model) -> None:
    agent, clicked = agent_with_tools(model)
    result = await agent.run([IMAGE, CLICK])
    (place,) = clicked
    assert is_at(CIRCLE, *place)
    assert result.output == "Done."


@pytest.mark.parametrize("output", [ToolOutput(ShapeOnScreen), NativeOutput(ShapeOnScreen)])
async def test_pydantic_ai_gets_structured_output(model: Model, output: Any) -> None:
    result: Any = await Agent(model, output_type=output, retries=0).run([IMAGE, DESCRIBE])
    assert is_the_circle(result.output)


async def test_pydantic_ai_streams_answer_in_pieces(connect: Connect) -> None:
    async with Agent(connect()).run_stream("Count from 1 to 10.") as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 10
    assert "".join(pieces).startswith("1, 2, 3, 4")


async def test_cancelled_pydantic_ai_stream_is_aborted(model: Model, abandons: Abandons) -> None:
    async with abandons, Agent(model).run_stream(COUNT) as result:
        stream = result.stream_text(delta=True, debounce_by=None)
        await anext(stream)
        await result.cancel()


async def test_pydantic_ai_raises_http_errors_with_status(connect: Connect, crowded: str) -> None:
    wrong: dict[int, Model] = {
        404: connect(name="gpt-4o"),
        400: connect(temperature=9),
        401: connect(api_key="another"),
        429: connect(api_key=crowded),
    }
    for status, model in wrong.items():
        with pytest.raises(ModelHTTPError) as caught:
            await Agent(model).run("Hi")
        assert caught.value.status_code == status


async def test_pydantic_ai_long_prompt_has_context_length_code(model: Model) -> None:
    with pytest.raises(ModelHTTPError) as caught:
        await Agent(model).run(TOO_LONG)
    body: Any = caught.value.body
    assert (caught.value.status_code, body["code"]) == (400, "context_length_exceeded")


# ---- answers of a scripted engine --------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
async def test_pydantic_ai_reads_reasoning_and_parallel_calls(
    scripted: str, engine: ScriptedEngine, kind: str
) -> None:
    engine.script = (
        *(thinks("Look, then click."), calls(0, "{}", id="call_1", name="screenshot")),
        *(calls(1, '{"x": 3, "y": 4}', id="call_2", name="click"),),
        *(calls(2, "{}", id="call_3", name="rest"), ended("tool_calls"), finished()),
    )
    agent, clicked = agent_with_tools(new_model(scripted, kind, "none"))

    @agent.tool_plain
    def rest() -> str:
        engine.script = HELLO
        return "rested"

    assert (await agent.run("Click.")).output == "Hello world"
    assert clicked == [(3, 4)]
    first, second = engine.submitted
    assert first.tools is not None
    assert "click" in first.tools.strict
    called = next(message for message in second.messages if message.tool_calls)
    names = ["screenshot", "click", "rest"]
    assert [call.name for call in called.tool_calls] == names
    assert [message.name for message in second.messages if message.role == "tool"] == names
    (shower,) = [message for message in second.messages if ImagePart(0) in message.content]
    assert shower.role == ("user" if kind == "chat" else "tool")


@pytest.mark.parametrize("kind", KINDS)
async def test_pydantic_ai_retries_invalid_answers(
    scripted: str, engine: ScriptedEngine, kind: str
) -> None:
    engine.script = (says('{"shape": "star"}'), ended(), finished())
    agent = Agent(
        new_model(scripted, kind, "none"), output_type=NativeOutput(ShapeOnScreen), retries=1
    )
    with pytest.raises(Exception, match="retries"):
        await agent.run("Hi")
    first, again = engine.submitted
    assert first.sampling.json_schema == again.sampling.json_schema
    assert len(again.messages) == len(first.messages) + 2
    assert again.messages[1].content == (TextPart('{"shape": "star"}'),)
