"""Reasoning: its request fields in all spellings, and its place in answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.unit.api.dialects.openai.test_answers import events
from tests.unit.api.dialects.openai.test_chat_fields import refusal
from tests.unit.api.requests import ROUTE, chat, user
from tests.unit.api.scripted_engine import ScriptedEngine, ended, finished, thinks
from tests.unit.api.scripted_engine import text as says
from vlm_server.api.dialects.reasoning import MAX_VARIABLES_BYTES, RESERVED
from vlm_server.protocol import Message, TextPart, Usage


@pytest.mark.parametrize(
    ("fields", "enabled", "budget"),
    [
        ({}, None, None),
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "minimal"}, True, 512),
        ({"reasoning_effort": "low"}, True, 1024),
        ({"reasoning_effort": "medium"}, True, 4096),
        ({"reasoning_effort": "high"}, True, None),
        ({"reasoning_effort": "xhigh"}, True, None),
        ({"thinking": {"type": "enabled"}}, True, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 99}}, True, 99),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"thinking": {"type": "auto"}}, None, None),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, None, 9),
        ({"reasoning": {"effort": "low"}}, True, 1024),
        ({"reasoning": {"effort": "none"}}, False, None),
        ({"reasoning": {"max_tokens": 7}}, None, 7),
        ({"reasoning": {"enabled": False}}, False, None),
        ({"reasoning_effort": "low", "thinking": {"type": "enabled", "budget_tokens": 5}}, True, 5),
        ({"reasoning": {"max_tokens": 7}, "reasoning_effort": "low"}, True, 7),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": None}}, None, None),
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "high"},
            True,
            None,
        ),
    ],
)
async def test_reasoning_fields_reach_engine_in_every_spelling(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    fields: dict[str, Any],
    enabled: bool | None,
    budget: int | None,
) -> None:
    answer = await client.post(ROUTE, json=chat(**fields))
    assert answer.status_code == 200, answer.text
    (submit,) = engine.submitted
    assert submit.template.enable_thinking is enabled
    assert submit.sampling.max_reasoning_tokens == budget


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"chat_template_kwargs": {"enable_thinking": True, "a": [1, {"b": "é"}]}},
            {"a": [1, {"b": "é"}]},
        ),
        (
            {"chat_template_kwargs": {"reasoning_effort": "x"}, "reasoning_effort": "low"},
            {"reasoning_effort": "x"},
        ),
    ],
)
async def test_chat_template_variables_reach_engine(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    fields: dict[str, Any],
    variables: dict[str, Any],
) -> None:
    assert (await client.post(ROUTE, json=chat(**fields))).status_code == 200
    assert json.loads(engine.submitted[0].template.variables) == variables


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "none", "thinking": {"type": "enabled"}}, "reasoning_effort"),
        ({"thinking": {"type": "disabled"}, "reasoning": {"effort": "low"}}, "thinking"),
        ({"reasoning": {"effort": "low", "enabled": False}}, "reasoning.effort"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"},
            "reasoning_effort",
        ),
        ({"thinking": {"type": "enabled", "more": 1}}, "thinking.more"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"chat_template_kwargs": {"a": "x" * MAX_VARIABLES_BYTES}}, "chat_template_kwargs"),
        *(
            ({"chat_template_kwargs": {name: 1}}, f"chat_template_kwargs.{name}")
            for name in sorted(RESERVED)
        ),
    ],
)
async def test_contradictory_reasoning_fields_are_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    assert (await refusal(client, chat(**fields)))["param"] == param


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_reasoning_in_history_reaches_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine, name: str
) -> None:
    assistant_turn = {"role": "assistant", "content": "A cat.", name: "Ears."}
    answer = await client.post(
        ROUTE, json=chat(user("hi"), assistant_turn, {**user("so?"), name: "x"})
    )
    assert engine.submitted[0].messages[1] == Message(
        "assistant", (TextPart("A cat."),), reasoning="Ears."
    )
    assert answer.headers["x-vlm-ignored"] == f"messages[].{name}"


async def test_second_reasoning_field_of_message_is_reported(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    for other, named in (("Ears.", None), ("Tail.", "messages[].reasoning")):
        assistant_turn = {"role": "assistant", "content": "A cat.", "reasoning_content": "Ears."}
        body = chat(user("hi"), {**assistant_turn, "reasoning": other}, user("so?"))
        assert (await client.post(ROUTE, json=body)).headers.get("x-vlm-ignored") == named
        assert engine.submitted[-1].messages[1].reasoning == "Ears."


SCRIPT = (thinks("Ea"), thinks("rs."), says("A "), says("cat."), ended())


async def test_chat_completion_separates_reasoning(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (*SCRIPT, finished(Usage(7, 5, 3, reasoning_tokens=4)))
    body = (await client.post(ROUTE, json=chat())).json()
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Ears.", "A cat.")
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4


async def test_truncated_reasoning_has_empty_content(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (thinks("Ea"), ended("length"), finished())
    (choice,) = (await client.post(ROUTE, json=chat())).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Ea", "")


async def test_chat_stream_separates_reasoning(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (*SCRIPT, finished())
    *chunks, _ = events(await client.post(ROUTE, json=chat(stream=True)))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Ea"},
        {"reasoning_content": "rs."},
        {"content": "A "},
        {"content": "cat."},
        {},
    ]
