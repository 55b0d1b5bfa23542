"""Tools: definitions in the prompt, calls and results in the history, calls in answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.unit.api.dialects.openai.test_answers import events
from tests.unit.api.dialects.openai.test_chat_fields import refusal
from tests.unit.api.requests import (
    ROUTE,
    assistant,
    called,
    chat,
    image_part,
    result,
    text,
    tool,
    user,
)
from tests.unit.api.scripted_engine import ScriptedEngine, calls, ended, finished, thinks
from tests.unit.api.scripted_engine import text as says
from vlm_server.protocol import ImagePart, Message, TextPart, ToolCall, Tools

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TWO = [tool("f", description="Does it.", parameters=PARAMETERS), tool("g", strict=True)]
NAMED = {"type": "function", "function": {"name": "g"}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def submitted(client: httpx.AsyncClient, engine: ScriptedEngine, **fields: Any) -> Any:
    answer = await client.post(ROUTE, json=chat(**fields))
    assert answer.status_code == 200, answer.text
    return engine.submitted[-1]


async def test_tool_definitions_have_templates_shape(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    tools = (await submitted(client, engine, tools=TWO)).tools
    no_parameters = {"type": "object", "properties": {}}
    assert json.loads(tools.definitions) == [
        TWO[0],
        {"type": "function", "function": {"name": "g", "parameters": no_parameters}},
    ]
    assert tools == Tools(tools.definitions, strict=("g",))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("auto", (), True)),
        ({"tool_choice": None}, ("auto", (), True)),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, ("auto", (), True)),
        ({"parallel_tool_calls": False}, ("auto", (), False)),
        ({"tool_choice": "required"}, ("required", (), True)),
        ({"tool_choice": NAMED}, ("required", ("g",), False)),
        ({"tool_choice": allowed("required", "g", "f")}, ("required", ("g", "f"), True)),
        (
            {"tool_choice": allowed("required", "g"), "parallel_tool_calls": False},
            ("required", ("g",), False),
        ),
    ],
)
async def test_tool_choice_reaches_engine(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: dict[str, Any], expected: Any
) -> None:
    tools = (await submitted(client, engine, tools=TWO, **fields)).tools
    assert (tools.choice, tools.allowed, tools.parallel) == expected
    assert len(json.loads(tools.definitions)) == 2


async def test_auto_choice_offers_only_allowed_tools(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    wanted = allowed("auto", "f")
    tools = (await submitted(client, engine, tools=TWO, tool_choice=wanted)).tools
    assert json.loads(tools.definitions) == TWO[:1]
    assert tools == Tools(tools.definitions)


@pytest.mark.parametrize("fields", [{"tools": TWO, "tool_choice": "none"}, {"tools": []}])
async def test_empty_tools_or_choice_none_offer_no_tools(
    client: httpx.AsyncClient, engine: ScriptedEngine, fields: dict[str, Any]
) -> None:
    assert (await submitted(client, engine, **fields)).tools is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("f"), tool("f")]}, "tools[1].function"),
        ({"tools": TWO, "tool_choice": tool("h")}, "tool_choice"),
        ({"tools": TWO, "tool_choice": allowed("auto", "h")}, "tool_choice"),
        ({"tools": TWO, "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tools": TWO, "tool_choice": allowed("none", "f")}, "tool_choice.allowed_tools.mode"),
        ({"tools": TWO, "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": TWO, "tool_choice": "required", "min_tokens": 1}, "min_tokens"),
    ],
)
async def test_contradictory_tools_and_choices_are_refused(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    assert (await refusal(client, chat(**fields)))["param"] == param


async def test_required_calls_ignore_response_format(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    wanted = {"type": "json_object"}
    body = chat(tools=TWO, tool_choice="required", response_format=wanted)
    answer = await client.post(ROUTE, json=body)
    assert answer.headers["x-vlm-ignored"] == "response_format"
    assert engine.submitted[0].sampling.json_schema is None
    submit = await submitted(client, engine, tools=TWO, response_format=wanted)
    assert submit.sampling.json_schema == '{"type":"object"}'


async def test_extra_fields_of_tool_are_ignored_and_named(client: httpx.AsyncClient) -> None:
    odd = {**tool("f", extra=1), "cache_control": {"type": "ephemeral"}}
    answer = await client.post(ROUTE, json=chat(tools=[odd]))
    assert answer.headers["x-vlm-ignored"] == "tools[].function.extra, tools[].cache_control"


async def test_text_like_call_stays_text_without_tools(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    written = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    engine.script = (says(written[:14]), says(written[14:]), ended(), finished())
    history = [user("Look."), assistant(called("1")), result("1", "done")]
    answer = await client.post(ROUTE, json=chat(*history))
    assert engine.submitted[0].tools is None
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": written, "refusal": None}


# ---- the history -----------------------------------------------------------------------


async def test_calls_and_results_reach_engine_with_images(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    history = [
        user("Look."),
        assistant(called("1", "f", '{"x": 1}'), called("2", "g", {"y": "é"})),
        result("2", text("Here:"), image_part()),
        {**result("1", "done"), "name": "other"},
        assistant(called("3", "f", ""), content="And:", reasoning_content="Hm."),
        {**result("3"), "content": []},
    ]
    answer = await client.post(ROUTE, json=chat(*history))
    assert answer.status_code == 200, answer.text
    calls_made = (ToolCall("1", "f", '{"x": 1}'), ToolCall("2", "g", '{"y": "é"}'))
    assert engine.submitted[0].messages == (
        Message("user", (TextPart("Look."),)),
        Message("assistant", (), tool_calls=calls_made),
        Message("tool", (TextPart("Here:"), ImagePart(0)), tool_call_id="2", name="g"),
        Message("tool", (TextPart("done"),), tool_call_id="1", name="other"),
        Message(
            "assistant",
            (TextPart("And:"),),
            reasoning="Hm.",
            tool_calls=(ToolCall("3", "f", "{}"),),
        ),
        Message("tool", (), tool_call_id="3", name="f"),
    )
    (image,) = engine.submitted[0].images
    assert image.param == "messages[2].content[1]"


@pytest.mark.parametrize("broken", ['{"x": 1', "[1]", "hello", "1e999", '{"x": NaN}', "[" * 5000])
async def test_truncated_call_stays_in_history(
    client: httpx.AsyncClient, engine: ScriptedEngine, broken: str
) -> None:
    history = [user("hi"), assistant(called("1", "f", broken)), result("1", "What?")]
    answer = await client.post(ROUTE, json=chat(*history))
    assert answer.status_code == 200, answer.text
    (call,) = engine.submitted[0].messages[1].tool_calls
    assert json.loads(call.arguments) == {"arguments": broken}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "content": "x"}], "messages[1].tool_call_id"),
        ([result("\ud800", "x")], "messages[1].tool_call_id"),
        ([assistant({**called("1"), "id": ""})], "messages[1].tool_calls[0].id"),
        ([assistant({**called("1"), "type": "custom"})], "messages[1].tool_calls[0].type"),
        ([assistant(called("1", "f", 5))], "messages[1].tool_calls[0].function.arguments"),
        ([assistant(called("1", "f", "\ud800"))], "messages[1].tool_calls[0].function.arguments"),
    ],
)
async def test_inconsistent_tool_history_is_refused(
    client: httpx.AsyncClient, messages: list[Any], param: str
) -> None:
    error = await refusal(client, chat(user("hi"), *messages, user("so?")))
    assert error["param"] == param, error


# ---- answers ---------------------------------------------------------------------------

ANSWER = (
    says("Let me "),
    says("see."),
    calls(0, id="call_a", name="f"),
    calls(0, '{"x": '),
    calls(0, "1}"),
    calls(1, '{"y": 2}', id="call_b", name="g"),
    ended("tool_calls"),
    finished(),
)
MADE = [called("call_a", "f", '{"x": 1}'), called("call_b", "g", '{"y": 2}')]


async def test_chat_completion_has_tool_calls(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = ANSWER
    (choice,) = (await client.post(ROUTE, json=chat(tools=TWO))).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me see.",
        "refusal": None,
        "tool_calls": MADE,
    }


async def test_calls_without_text_have_no_content(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (thinks("Hm."), *ANSWER[2:])
    (choice,) = (await client.post(ROUTE, json=chat(tools=TWO))).json()["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "reasoning_content": "Hm.",
        "tool_calls": MADE,
    }


async def test_streamed_calls_begin_with_id_and_name(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = ANSWER
    *chunks, _ = events(await client.post(ROUTE, json=chat(tools=TWO, stream=True)))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta["content"] for delta in deltas[:3]] == ["", "Let me ", "see."]

    def head(index: int, id: str, name: str) -> dict[str, Any]:
        function = {"name": name, "arguments": ""}
        return {"index": index, "id": id, "type": "function", "function": function}

    def more(index: int, arguments: str) -> dict[str, Any]:
        return {"index": index, "function": {"arguments": arguments}}

    assert deltas[3:] == [
        *(
            {"tool_calls": [each]}
            for each in (
                head(0, "call_a", "f"),
                more(0, '{"x": '),
                more(0, "1}"),
                head(1, "call_b", "g"),
                more(1, '{"y": 2}'),
            )
        ),
        {},
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_choices_have_their_own_calls(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.script = (
        *(calls(0, "{}", id="a", name="f", choice=1), says("No.", 0)),
        *(ended("tool_calls", 1), ended("stop", 0), finished()),
    )
    first, second = (await client.post(ROUTE, json=chat(tools=TWO, n=2))).json()["choices"]
    assert (first["message"]["content"], first["finish_reason"]) == ("No.", "stop")
    assert "tool_calls" not in first["message"]
    assert second["message"]["tool_calls"] == [called("a")]
    assert second["finish_reason"] == "tool_calls"
    *chunks, _ = events(await client.post(ROUTE, json=chat(tools=TWO, n=2, stream=True)))
    of_calls = [c["choices"][0] for c in chunks if "tool_calls" in c["choices"][0]["delta"]]
    assert [choice["index"] for choice in of_calls] == [1, 1]
