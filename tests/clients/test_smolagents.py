"""smolagents' `ToolCallingAgent`, which forces a call in every step.

Tool results are text; a callback adds images to the observations. The agent's model class turns
calls and results into text messages."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import openai
import PIL.Image
import pytest
from smolagents import (
    ActionStep,
    AgentGenerationError,
    ChatMessage,
    MessageRole,
    OpenAIServerModel,
    Tool,
    ToolCallingAgent,
    tool,
)
from smolagents.monitoring import LogLevel

from tests.clients.conftest import Abandons
from tests.clients.screen import (
    CIRCLE,
    CLICK,
    COLOUR,
    COUNT,
    DESCRIBE,
    TOO_LONG,
    ShapeOnScreen,
    is_at,
    is_the_circle,
    screenshot,
)
from tests.support.daemons import Daemon
from tests.unit.api.scripted_engine import ScriptedEngine, calls, ended, finished
from vlm_server.protocol import ImagePart

IMAGE = PIL.Image.open(io.BytesIO(screenshot()))
FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "thing", "schema": ShapeOnScreen.model_json_schema()},
}


class Mouse:
    """A `click` tool that records its clicks."""

    def __init__(self) -> None:
        self.clicked: list[tuple[int, int]] = []

    def tool(self) -> Tool:
        @tool
        def click(x: int, y: int) -> str:
            """Click at a point.

            Args:
                x: From the left
                y: From the top
            """
            self.clicked.append((x, y))
            return "clicked"

        return click


def connect(
    url: str, api_key: str = "none", name: str = "demo", **fields: Any
) -> OpenAIServerModel:
    return OpenAIServerModel(
        name,
        api_base=f"{url}/v1",
        api_key=api_key,
        client_kwargs={"max_retries": 0},
        retry=False,
        **{"temperature": 0, "max_tokens": 400, **fields},
    )


@pytest.fixture
def model(daemon: Daemon) -> OpenAIServerModel:
    return connect(daemon.url, daemon.api_key)


def agent(model: OpenAIServerModel, *tools: Tool, **fields: Any) -> ToolCallingAgent:
    tool_agent = ToolCallingAgent(list(tools), model, verbosity_level=LogLevel.OFF, **fields)
    tool_agent.prompt_templates["system_prompt"] = "You use tools."
    return tool_agent


def user(*content: Any) -> ChatMessage:
    parts = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "image": part}
        for part in content
    ]
    return ChatMessage(role=MessageRole.USER, content=parts)


def test_smolagents_answers_image_with_usage(model: OpenAIServerModel) -> None:
    answer = model.generate([user(IMAGE, COLOUR)])
    assert answer.content == "red"
    assert answer.token_usage is not None
    assert answer.token_usage.input_tokens > 100


def test_smolagents_clicks_circle(model: OpenAIServerModel) -> None:
    answer = model.generate([user(IMAGE, CLICK)], tools_to_call_from=[Mouse().tool()])
    (call,) = answer.tool_calls or ()
    arguments: Any = model.parse_tool_calls(answer).tool_calls[0].function.arguments  # type: ignore[index]
    assert call.function.name == "click"
    assert is_at(CIRCLE, **arguments)


@pytest.mark.parametrize("streams", [False, True])
def test_smolagents_steps_with_valid_calls(model: OpenAIServerModel, streams: bool) -> None:
    """The embedded model does not end by itself; every step is a valid call."""
    mouse = Mouse()
    runner = agent(model, mouse.tool(), stream_outputs=streams)
    for step in runner.run(CLICK, images=[IMAGE], max_steps=2, stream=True):
        if isinstance(step, ActionStep):
            assert step.error is None
            assert step.tool_calls
    assert mouse.clicked


def test_smolagents_gets_structured_output(model: OpenAIServerModel) -> None:
    answer = model.generate([user(IMAGE, DESCRIBE)], response_format=FORMAT)
    assert is_the_circle(ShapeOnScreen.model_validate_json(str(answer.content)))


def test_smolagents_streams_answer_with_usage(model: OpenAIServerModel) -> None:
    deltas = list(model.generate_stream([user("Count from 1 to 10.")]))
    assert len(deltas) > 10
    assert "".join(delta.content or "" for delta in deltas).startswith("1, 2, 3, 4")
    assert deltas[-1].token_usage is not None


def test_closed_smolagents_model_aborts_its_stream(
    model: OpenAIServerModel, abandons: Abandons
) -> None:
    """Closing the generator leaves the inner stream open; closing the client ends it."""
    with abandons:
        stream = model.generate_stream([user(COUNT)])
        next(iter(stream))
        model.client.close()


def test_smolagents_raises_openais_errors(daemon: Daemon, crowded: str) -> None:
    wrong: dict[type[Exception], OpenAIServerModel] = {
        openai.NotFoundError: connect(daemon.url, daemon.api_key, "gpt-4o"),
        openai.BadRequestError: connect(daemon.url, daemon.api_key, temperature=9),
        openai.AuthenticationError: connect(daemon.url, "another"),
        openai.RateLimitError: connect(daemon.url, crowded),
    }
    for expected, model in wrong.items():
        with pytest.raises(expected):
            model.generate([user("Hi")])
        with pytest.raises(AgentGenerationError) as caught:
            agent(model).run("Hi")
        assert isinstance(caught.value.__cause__, expected)


def test_smolagents_long_prompt_has_context_length_code(model: OpenAIServerModel) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        model.generate([user(TOO_LONG)])
    assert caught.value.code == "context_length_exceeded"


# ---- answers of a scripted engine --------------------------------------------------------


async def test_smolagents_tool_loop_reads_screenshots(
    scripted: str, engine: ScriptedEngine
) -> None:
    """Several calls in a step, then the callback's images, then the answer."""
    mouse = Mouse()
    engine.script = (
        calls(0, '{"x": 3, "y": 4}', id="call_1", name="click"),
        calls(1, '{"x": 5, "y": 6}', id="call_2", name="click"),
        *(ended("tool_calls"), finished()),
    )

    def look(step: ActionStep) -> None:
        step.observations_images = [IMAGE]
        answer = calls(0, '{"answer": "Ünïcode \\"it\\" is"}', id="call_3", name="final_answer")
        engine.script = (answer, ended("tool_calls"), finished())

    runner = agent(connect(scripted), mouse.tool(), step_callbacks=[look])
    found = await asyncio.to_thread(runner.run, "Click twice.")
    assert found == 'Ünïcode "it" is'
    assert sorted(mouse.clicked) == [(3, 4), (5, 6)]
    first, second = engine.submitted
    assert first.tools is not None
    assert first.tools.choice == "required"
    shown = [part for message in second.messages for part in message.content]
    assert sum(isinstance(part, ImagePart) for part in shown) == 1


async def test_smolagents_streams_calls(scripted: str, engine: ScriptedEngine) -> None:
    engine.script = (
        *(calls(0, id="call_1", name="final_answer"), calls(0, '{"answer"'), calls(0, ': "red"}')),
        *(ended("tool_calls"), finished()),
    )
    runner = agent(connect(scripted), stream_outputs=True)
    assert await asyncio.to_thread(runner.run, "Which?") == "red"


async def test_smolagents_raises_server_error_while_engine_restarts(
    scripted: str, engine: ScriptedEngine
) -> None:
    engine.be("restarting")
    with pytest.raises(openai.InternalServerError):
        await asyncio.to_thread(connect(scripted).generate, [user("Hi")])
