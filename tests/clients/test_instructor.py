"""instructor returns objects. It has no tool loop; several calls are several objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import instructor
import openai
import pydantic
import pytest
from instructor import Image, Mode
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException

from tests.clients.conftest import Abandons
from tests.clients.screen import DESCRIBE, TOO_LONG, URL, ShapeOnScreen, is_the_circle
from tests.support.daemons import Daemon
from tests.unit.api.scripted_engine import ScriptedEngine, calls, ended, finished
from tests.unit.api.scripted_engine import text as says
from vlm_server.protocol import ImagePart, TextPart

IMAGE = Image.from_base64(URL)
MODES = [Mode.TOOLS, Mode.JSON_SCHEMA]
"""Those in which the answer is held to the class; in `JSON` and `MD_JSON` a prompt describes it."""
STAR = ShapeOnScreen(shape="star", color="blue", count=2, x=3, y=4)
MESSAGES: Any = [{"role": "user", "content": [IMAGE, DESCRIBE]}]
GREEDY: Any = {"model": "demo", "max_retries": 0, "temperature": 0, "max_tokens": 400}

Connect = Callable[..., instructor.Instructor]


class Crowd(pydantic.BaseModel):
    """A list of so many items that the answer takes a while."""

    things: list[ShapeOnScreen] = pydantic.Field(min_length=20, max_length=20)


@pytest.fixture
def connect(daemon: Daemon) -> Connect:
    def connected_client(
        mode: Mode = Mode.TOOLS, api_key: str = daemon.api_key
    ) -> instructor.Instructor:
        return instructor.from_openai(daemon.client(api_key=api_key), mode=mode)

    return connected_client


@pytest.mark.parametrize("mode", MODES)
def test_instructor_returns_object_about_image(connect: Connect, mode: Mode) -> None:
    client = connect(mode)
    fields = {**GREEDY, "response_model": ShapeOnScreen, "messages": MESSAGES}
    thing, answer = client.chat.completions.create_with_completion(**fields)
    assert is_the_circle(thing)
    assert answer.usage.prompt_tokens > 100


@pytest.mark.parametrize("mode", MODES)
def test_instructor_reads_image_after_earlier_turns(connect: Connect, mode: Mode) -> None:
    """Only user messages can have images here: instructor's tool results are text."""
    looked: Any = [
        {"role": "user", "content": "Take a screenshot."},
        {"role": "assistant", "content": "Done."},
        *MESSAGES,
    ]
    thing = connect(mode).chat.completions.create(
        **GREEDY, response_model=ShapeOnScreen, messages=looked
    )
    assert thing.shape == "circle"


@pytest.mark.parametrize("mode", MODES)
async def test_instructor_streams_partial_objects(daemon: Daemon, mode: Mode) -> None:
    client = instructor.from_openai(daemon.async_client(), mode=mode)
    fields = {**GREEDY, "response_model": ShapeOnScreen, "messages": MESSAGES}
    parts = [part async for part in client.chat.completions.create_partial(**fields)]
    assert len(parts) > 10
    assert parts[0].shape is None
    assert is_the_circle(ShapeOnScreen(**parts[-1].model_dump()))


async def test_closed_instructor_client_aborts_its_stream(
    daemon: Daemon, abandons: Abandons
) -> None:
    """Closing the partial stream leaves the inner stream open; closing the client ends it."""
    inner = daemon.async_client()
    client = instructor.from_openai(inner)
    fields = {**GREEDY, "response_model": Crowd, "messages": MESSAGES, "max_tokens": 2000}
    async with abandons:
        stream: Any = client.chat.completions.create_partial(**fields)
        await anext(stream)
        await inner.close()


def test_instructor_raises_on_truncated_answers(connect: Connect) -> None:
    fields = {**GREEDY, "response_model": ShapeOnScreen, "messages": MESSAGES, "max_tokens": 5}
    with pytest.raises((IncompleteOutputException, InstructorRetryException)):
        connect().chat.completions.create(**fields)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model": "gpt-4o"}, openai.NotFoundError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": TOO_LONG}]}, openai.BadRequestError),
    ],
)
def test_instructor_wraps_openais_errors(
    connect: Connect, fields: Any, expected: type[Exception]
) -> None:
    fields = {**GREEDY, "response_model": ShapeOnScreen, "messages": MESSAGES, **fields}
    with pytest.raises(InstructorRetryException) as caught:
        connect().chat.completions.create(**fields)
    assert isinstance(caught.value.__cause__, expected)


def test_instructor_wraps_errors_of_keys(connect: Connect, crowded: str) -> None:
    errors = {"another": openai.AuthenticationError, crowded: openai.RateLimitError}
    for key, expected in errors.items():
        with pytest.raises(InstructorRetryException) as caught:
            connect(api_key=key).chat.completions.create(
                **GREEDY, response_model=ShapeOnScreen, messages=MESSAGES
            )
        assert isinstance(caught.value.__cause__, expected)


# ---- answers of a scripted engine --------------------------------------------------------


def scripted_client(scripted: str, mode: Mode) -> instructor.AsyncInstructor:
    client = openai.AsyncOpenAI(base_url=f"{scripted}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=mode)


@pytest.mark.parametrize("mode", [Mode.JSON, Mode.MD_JSON, *MODES])
async def test_instructor_gets_object_in_every_mode(
    scripted: str, engine: ScriptedEngine, mode: Mode
) -> None:
    content = STAR.model_dump_json()
    if mode is Mode.TOOLS:
        engine.script = (
            calls(0, content, id="call_1", name="ShapeOnScreen"),
            ended("tool_calls"),
            finished(),
        )
    else:
        engine.script = (
            says(f"```json\n{content}\n```" if mode is Mode.MD_JSON else content),
            ended(),
        )
        engine.script += (finished(),)
    found = await scripted_client(scripted, mode).chat.completions.create(
        **GREEDY, response_model=ShapeOnScreen, messages=MESSAGES
    )
    assert found.model_dump() == STAR.model_dump()
    (submit,) = engine.submitted
    assert any(isinstance(part, ImagePart) for part in submit.messages[-1].content)
    if mode is Mode.TOOLS:
        assert submit.tools is not None
        assert (submit.tools.choice, submit.tools.allowed) == ("required", ("ShapeOnScreen",))
    else:
        assert (submit.sampling.json_schema is None) == (mode is Mode.MD_JSON)


async def test_instructor_reads_parallel_calls_as_objects(
    scripted: str, engine: ScriptedEngine
) -> None:
    other = STAR.model_copy(update={"count": 3})
    engine.script = (
        *(
            calls(i, each.model_dump_json(), id=f"c{i}", name="ShapeOnScreen")
            for i, each in enumerate((STAR, other))
        ),
        *(ended("tool_calls"), finished()),
    )
    found: Any = await scripted_client(scripted, Mode.PARALLEL_TOOLS).chat.completions.create(
        **GREEDY, response_model=Iterable[ShapeOnScreen], messages=MESSAGES
    )
    assert list(found) == [STAR, other]


async def test_instructor_sends_validation_errors_and_retries(
    scripted: str, engine: ScriptedEngine
) -> None:
    engine.script = (
        calls(0, '{"shape": "star"}', id="c", name="ShapeOnScreen"),
        ended("tool_calls"),
        finished(),
    )
    fields = {**GREEDY, "response_model": ShapeOnScreen, "messages": MESSAGES, "max_retries": 1}
    with pytest.raises(InstructorRetryException):
        await scripted_client(scripted, Mode.TOOLS).chat.completions.create(**fields)
    first, again = engine.submitted
    (call,) = again.messages[len(first.messages)].tool_calls
    assert call.arguments == '{"shape": "star"}'
    (result,) = [message for message in again.messages if message.role == "tool"]
    (part,) = result.content
    assert isinstance(part, TextPart)
    assert "Field required" in part.text
