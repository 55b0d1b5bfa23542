"""A trained model in a real daemon: what people ask of it holds for real text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from tests.e2e.test_chat_api import complete, streamed, text_of
from tests.support.daemons import Daemon, running_daemon, with_settings
from tests.support.trained import trained_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.whole]

SEA = [{"role": "user", "content": "Write two sentences about the sea."}]
BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "author": {"type": "string", "maxLength": 40},
        "pages": {"type": "integer"},
        "price": {"type": "number", "exclusiveMinimum": 0},
        "rating": {"type": "number", "minimum": 0, "maximum": 5},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["title", "author", "pages", "price", "rating", "tags"],
    "additionalProperties": False,
}
NUMBERS = {
    "type": "object",
    "properties": {
        "population": {"type": "integer"},
        "area": {"type": "number"},
        "share": {"anyOf": [{"type": "null"}, {"type": "number"}]},
        "years": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3},
    },
    "required": ["population", "area", "share", "years"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 30},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
        },
    },
}
SCRIPTS = "Grüße, 世界! 😀 👩‍👩‍👧 «Ω» नमस्ते"


@pytest.fixture(scope="module")
def trained_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    model = ("--model", str(trained_checkpoint()), *with_settings("model.name=trained"))
    one_thread = {"OPENBLAS_NUM_THREADS": "1"}  # more of them slow each other down among tests
    folder = tmp_path_factory.mktemp("trained")
    with running_daemon(folder, *model, environment=one_thread) as running:
        yield running


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def asked(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_streamed_english_equals_whole_answer(trained_daemon: Daemon) -> None:
    fields = {"messages": SEA, "max_tokens": 40}
    text, chunks = streamed(trained_daemon, **fields)
    assert text == text_of(trained_daemon, **fields)
    assert text.startswith("The sea is")
    assert len(chunks) > 20


@pytest.mark.parametrize("stop", ["vast and", "st a"])
def test_stop_string_across_tokens_ends_answer_before_it(trained_daemon: Daemon, stop: str) -> None:
    whole = text_of(trained_daemon, messages=SEA, max_tokens=40)
    assert stop in whole
    (choice,) = complete(trained_daemon, messages=SEA, max_tokens=40, stop=[stop]).choices
    assert choice.finish_reason == "stop"
    assert choice.message.content == whole[: whole.index(stop)]


def test_streamed_scripts_and_emoji_equal_whole_answer(trained_daemon: Daemon) -> None:
    """A schema has the model write them, byte by byte where its vocabulary has no more."""
    fields = {"response_format": schema_format({"const": SCRIPTS}), "max_tokens": 200}
    text, chunks = streamed(trained_daemon, **fields)
    assert json.loads(text) == SCRIPTS
    assert text == text_of(trained_daemon, **fields)
    assert all("�" not in (c.choices[0].delta.content or "") for c in chunks if c.choices)


@pytest.mark.parametrize(
    ("schema", "question"),
    [
        (BOOK, "Describe a famous book as JSON with title, author, pages, price, rating, tags."),
        (NUMBERS, "Give the population, area, share and three years of France as JSON."),
        ({"type": "number"}, "What is pi? Write as many digits as you can."),
        ({"type": "integer"}, "Write the largest number that you know."),
    ],
)
def test_answer_obeys_schema_and_its_numbers_end(
    trained_daemon: Daemon, schema: Any, question: str
) -> None:
    fields = {"response_format": schema_format(schema), "max_tokens": 300}
    (choice,) = complete(trained_daemon, messages=asked(question), **fields).choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), schema)


def asked_of_weather(*cities: tuple[str, int, str]) -> list[dict[str, Any]]:
    """A conversation in which the tool was called for each city, and has answered."""
    messages: list[dict[str, Any]] = []
    for city, days, weather in cities:
        arguments = json.dumps({"city": city, "days": days})
        function = {"name": "get_weather", "arguments": arguments}
        messages += [
            *asked(f"What is the weather in {city} for the next {days} days?"),
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": city, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": city, "content": weather},
            {"role": "assistant", "content": f"It will be {weather}."},
        ]
    return [*messages, *asked("What is the weather in Paris for the next 3 days?")]


@pytest.mark.parametrize(
    ("choice", "strict", "messages"),
    [
        ("required", True, asked_of_weather()),
        ("auto", True, asked_of_weather(("London", 2, "rainy"), ("Rome", 5, "sunny"))),
        ("auto", False, asked_of_weather(("London", 2, "rainy"), ("Rome", 5, "sunny"))),
    ],
)
def test_tool_is_called_with_arguments_of_question(
    trained_daemon: Daemon, choice: str, strict: bool, messages: list[dict[str, Any]]
) -> None:
    tool = {**WEATHER, "function": {**WEATHER["function"], "strict": strict}}
    fields = {"messages": messages, "tools": [tool], "tool_choice": choice, "max_tokens": 80}
    (answer,) = complete(trained_daemon, **fields).choices
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris", "days": 3}
