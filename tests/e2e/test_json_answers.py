"""`response_format` in a real daemon: answers conform, and other requests are unaffected."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.e2e.test_chat_api import complete, streamed, text_of
from tests.support.daemons import Daemon
from tests.support.images import noise, user
from tests.support.whole_run import few_of

pytestmark = pytest.mark.e2e

SCHEMA = {
    "type": "object",
    "properties": {
        "shape": {"enum": ["circle", "square", "star"]},
        "colours": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
        "count": {"type": "integer", "minimum": 0, "maximum": 20},
        "text": {"type": ["string", "null"], "maxLength": 12},
    },
    "required": ["shape", "colours", "count", "text"],
    "additionalProperties": False,
}
STRICT = {
    "type": "json_schema",
    "json_schema": {"name": "scene", "strict": True, "schema": SCHEMA},
}
TOO_MUCH = {"allOf": [{"type": "string", "pattern": f"a{{{i}}}b"} for i in range(1, 200)]}
"""Takes minutes and 20 GB to compile."""


class Scene(pydantic.BaseModel):
    """An image as a client's own class."""

    shape: Literal["circle", "square", "star"]
    count: int = pydantic.Field(ge=0, le=20)
    is_filled: bool | None


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.mark.parametrize(
    "fields", few_of([{}, {"temperature": 1.5, "seed": 3}], [{"temperature": 1.5, "seed": 3}])
)
def test_strict_schema_is_obeyed_whole_and_streamed(
    tiny_daemon: Daemon, fields: dict[str, Any]
) -> None:
    fields = {"response_format": STRICT, "max_tokens": 200, **fields}
    fields["messages"] = [user(noise(3, (96, 96)), "What is this?")]
    (choice,) = complete(tiny_daemon, **fields).choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    text, chunks = streamed(tiny_daemon, **fields)
    assert text == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_every_choice_conforms_to_schema(tiny_daemon: Daemon) -> None:
    fields = {"temperature": 1.5, "seed": 1, "max_tokens": 200}
    choices = complete(tiny_daemon, response_format=STRICT, n=3, **fields).choices
    assert len({choice.message.content for choice in choices}) == 3
    for choice in choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_json_object_format_returns_object(tiny_daemon: Daemon) -> None:
    """Without the grammar a random model would write an endless name."""
    text = text_of(tiny_daemon, response_format={"type": "json_object"})
    assert text.startswith("{")
    text = text_of(tiny_daemon, response_format={"type": "json_object"}, logit_bias={"92": 100})
    assert json.loads(text) == {}


def test_openai_client_parses_its_classes(tiny_daemon: Daemon) -> None:
    answer = tiny_daemon.client().chat.completions.parse(
        model="default", messages=[user("What?")], temperature=0, response_format=Scene
    )
    assert isinstance(answer.choices[0].message.parsed, Scene)
    with tiny_daemon.client().chat.completions.stream(
        model="default", messages=[user("What?")], temperature=0, response_format=Scene
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


@pytest.mark.whole
async def test_unconstrained_rows_are_unaffected_by_grammars_in_batch(
    tiny_daemon: Daemon,
) -> None:
    client = tiny_daemon.async_client()

    async def answer_to(seed: int, **fields: Any) -> str:
        answer = await client.chat.completions.create(
            model="default",
            messages=[user(noise(seed, (96, 96)), "What?" * (seed + 1))],
            temperature=0.9 if seed % 2 else 0,
            seed=seed,
            max_tokens=150,
            **fields,
        )
        return answer.choices[0].message.content or ""

    kinds: list[dict[str, Any]] = [{}, {"response_format": STRICT}]
    alone = [await answer_to(seed, **kinds[seed // 2 % 2]) for seed in range(8)]
    together = await asyncio.gather(*(answer_to(seed, **kinds[seed // 2 % 2]) for seed in range(8)))
    assert together == alone
    for seed in (2, 3, 6, 7):
        jsonschema.validate(json.loads(together[seed]), SCHEMA)


@pytest.mark.parametrize(
    "schema", [{"type": "text"}, {"enum": []}, {"not": {}}, {"$ref": "#/$defs/none"}]
)
def test_unsatisfiable_schema_is_refused(tiny_daemon: Daemon, schema: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(tiny_daemon, response_format=schema_format(schema))
    assert caught.value.param == "response_format.json_schema.schema"
    assert caught.value.code == "invalid_value"


async def test_costly_schema_is_refused_without_delaying_others(tiny_daemon: Daemon) -> None:
    pid, alone = tiny_daemon.engine_pid(), text_of(tiny_daemon, max_tokens=20)
    client = tiny_daemon.async_client()
    fields = {"model": "default", "messages": [user("Hello")], "temperature": 0}
    refused = asyncio.create_task(
        client.chat.completions.create(**fields, response_format=schema_format(TOO_MUCH))
    )
    await asyncio.sleep(0.5)
    answer = await client.chat.completions.create(**fields, max_tokens=20)
    assert not refused.done()
    assert answer.choices[0].message.content == alone
    with pytest.raises(openai.BadRequestError, match=r"seconds|memory"):
        await refused
    assert tiny_daemon.engine_pid() == pid


async def test_disconnected_clients_leave_no_grammar_behind(tiny_daemon: Daemon) -> None:
    client = tiny_daemon.async_client()
    for _ in range(3):
        stream = await client.chat.completions.create(
            model="default",
            messages=[user("Hello")],
            response_format=schema_format({"type": "string", "minLength": 5000}),
            stream=True,
        )
        await anext(stream)
        await stream.close()
    tiny_daemon.wait_idle()
