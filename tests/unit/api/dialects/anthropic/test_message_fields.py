"""Every field of Anthropic's messages reaches the engine, is reported as ignored, or is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.unit.api.dialects.anthropic.steps import (
    COUNT_ROUTE,
    IMAGE_BLOCK,
    LOOK,
    PNG,
    ROUTE,
    assistant,
    call,
    request,
    result,
    text,
)
from tests.unit.api.requests import user
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.protocol import ImagePart, SamplingParams, Submit, TemplateOptions, TextPart


class Asker:
    def __init__(self, client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
        self.client, self.engine = client, engine
        self.ignored = ""

    async def submit(self, *messages: dict[str, Any], **fields: Any) -> Submit:
        """Send a request and return the engine's `Submit`."""
        answer = await self.client.post(ROUTE, json=request(*messages, **fields))
        assert answer.status_code == 200, answer.text
        self.ignored = answer.headers.get("x-vlm-ignored", "")
        return self.engine.submitted[-1]

    async def error(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Send a request that must be refused before the engine; return the error."""
        before = len(self.engine.submitted)
        answer = await self.client.post(ROUTE, json=request(*messages, **fields))
        assert answer.status_code == 400
        assert answer.json()["type"] == "error"
        assert len(self.engine.submitted) == before
        error: dict[str, Any] = answer.json()["error"]
        return error


@pytest.fixture
def ask(client: httpx.AsyncClient, engine: ScriptedEngine) -> Asker:
    return Asker(client, engine)


async def test_anthropic_sampling_fields_reach_engine(ask: Asker) -> None:
    submit = await ask.submit(
        temperature=0.5, top_p=0.9, top_k=40, max_tokens=65535, stop_sequences=["a", "b"]
    )
    assert submit.sampling == SamplingParams(65535, 0.5, 0.9, None, ("a", "b"), 40)
    assert (await ask.submit()).sampling == SamplingParams(9)


@pytest.mark.parametrize(
    ("thinking", "enabled", "budget"),
    [
        (None, None, None),
        ({"type": "enabled", "budget_tokens": 2000}, True, 2000),
        ({"type": "enabled", "budget_tokens": 0}, True, 0),
        ({"type": "adaptive"}, None, None),
        ({"type": "adaptive", "budget_tokens": 9}, None, 9),
        ({"type": "disabled"}, False, None),
    ],
)
async def test_anthropic_thinking_reaches_engine(
    ask: Asker, thinking: Any, enabled: bool | None, budget: int | None
) -> None:
    submit = await ask.submit(thinking=thinking)
    assert submit.template == TemplateOptions(enable_thinking=enabled)
    assert submit.sampling.max_reasoning_tokens == budget


# ---- messages --------------------------------------------------------------------------


async def test_encrypted_reasoning_is_reported(ask: Asker) -> None:
    hidden = {"type": "redacted_thinking", "data": "Rm9v"}
    await ask.submit(user("a"), assistant(hidden, text("b")), user("c"))
    assert ask.ignored == "messages[].content[].redacted_thinking"


async def test_anthropic_system_prompt_becomes_system_message(ask: Asker) -> None:
    submit = await ask.submit(system="Be brief.")
    assert submit.messages[0].content == (TextPart("Be brief."),)
    blocks = [text("x-anthropic-billing-header: cch=1f2e;"), text("Be "), text("brief.")]
    submit = await ask.submit(system=blocks)
    assert submit.messages[0].content == (TextPart("Be "), TextPart("brief."))
    assert ask.ignored == "x-anthropic-billing-header"
    submit = await ask.submit(system=blocks[:1])
    assert [message.role for message in submit.messages] == ["user"]


async def test_anthropic_system_messages_keep_their_place(ask: Asker) -> None:
    submit = await ask.submit(
        user("hi"), {"role": "system", "content": "News."}, assistant("ho"),
        {"role": "system", "content": [text("More.")]}, user("so"), system="Be brief.",
    )  # fmt: skip
    roles = [message.role for message in submit.messages]
    assert roles == ["system", "user", "system", "assistant", "system", "user"]
    assert submit.messages[4].content == (TextPart("More."),)


async def test_anthropic_thinking_blocks_become_reasoning(ask: Asker) -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "any"}
    redacted = {"type": "redacted_thinking", "data": "c2VjcmV0"}
    submit = await ask.submit(user("a"), assistant(thought, redacted, text("b")), user("c"))
    assert submit.messages[1].reasoning == "Hm."
    assert submit.messages[1].content == (TextPart("b"),)
    assert "c2VjcmV0" not in str(submit)


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (result(text("a"), IMAGE_BLOCK, text("b")), (TextPart("a"), ImagePart(0), TextPart("b"))),
        (result() | {"content": "words"}, (TextPart("words"),)),
        (result() | {"content": None}, (TextPart(""),)),
        (result(text("a"), is_error=True), (TextPart("Error: "), TextPart("a"))),
        (result(text("a"), is_error=False), (TextPart("a"),)),
    ],
)
async def test_anthropic_tool_results_become_tool_turns(
    ask: Asker, block: dict[str, Any], expected: Any
) -> None:
    submit = await ask.submit(user("a"), assistant(call(screen=1)), user(block))
    turn = submit.messages[2]
    assert (turn.role, turn.tool_call_id, turn.name) == ("tool", "call_1", "look")
    assert turn.content == expected


async def test_tool_results_and_text_between_keep_their_order(ask: Asker) -> None:
    submit = await ask.submit(
        user("a"),
        assistant(call("x"), call("y")),
        user(
            result(IMAGE_BLOCK, call_id="x"),
            text("and"),
            result(IMAGE_BLOCK, call_id="y"),
            text("so?"),
        ),
    )
    turns = [
        (message.role, message.tool_call_id, message.content) for message in submit.messages[2:]
    ]
    assert turns == [
        ("tool", "x", (ImagePart(0),)),
        ("user", "", (TextPart("and"),)),
        ("tool", "y", (ImagePart(1),)),
        ("user", "", (TextPart("so?"),)),
    ]
    assert submit.images[1].param == "messages[2].content[2].content[0]"


async def test_last_assistant_message_is_continued(ask: Asker) -> None:
    submit = await ask.submit(user("a"), assistant("The answer is"))
    assert submit.template.continue_final
    assert not (await ask.submit(user("a"), assistant("b"), user("c"))).template.continue_final
    error = await ask.error(user("a"), assistant(call()))
    assert error["param"] == "messages[1]"


# ---- tools -----------------------------------------------------------------------------


async def test_anthropic_tools_reach_engine_as_functions(ask: Asker) -> None:
    strict = {"name": "other", "input_schema": {"type": "object"}, "type": "custom", "strict": True}
    tools = (await ask.submit(tools=[LOOK, strict])).tools
    assert tools is not None
    first, second = json.loads(tools.definitions)
    assert first == {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Takes a screenshot.",
            "parameters": LOOK["input_schema"],
        },
    }
    assert second["function"]["name"] == "other"
    assert (tools.strict, tools.choice, tools.parallel) == (("other",), "auto", True)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", (), True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", (), False)),
        ({"type": "any"}, ("required", (), True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", (), False)),
        ({"type": "tool", "name": "look"}, ("required", ("look",), False)),
    ],
)
async def test_anthropic_tool_choice_reaches_engine(ask: Asker, choice: Any, expected: Any) -> None:
    tools = (await ask.submit(tools=[LOOK], tool_choice=choice)).tools
    assert tools is not None
    assert (tools.choice, tools.allowed, tools.parallel) == expected


@pytest.mark.parametrize(
    ("tool", "ignored"),
    [
        (
            {**LOOK, "display_width_px": 9, "enable_zoom": True, "max_characters": 5},
            "tools[].display_width_px, tools[].enable_zoom, tools[].max_characters",
        ),
        (
            {**LOOK, "type": "bash_20250124", "display_height_px": 9},
            "tools[].description, tools[].input_schema, tools[].display_height_px",
        ),
        ({"name": "edit", "type": "text_editor_20250728", "max_characters": 5}, ""),
    ],
)
async def test_fields_of_other_tool_types_are_reported(
    ask: Asker, tool: dict[str, Any], ignored: str
) -> None:
    await ask.submit(tools=[tool])
    assert ask.ignored == ignored


async def test_anthropic_choice_none_offers_no_tools(ask: Asker) -> None:
    assert (await ask.submit(tools=[LOOK], tool_choice={"type": "none"})).tools is None
    assert (await ask.submit(tools=[])).tools is None


# ---- ignored and refused fields --------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [assistant("a")]}, "messages"),
        ({"messages": [user()]}, "messages[0].content"),
        ({"messages": [user({"type": "search_result"})]}, "messages[0].content[0].type"),
        ({"messages": [user(call())]}, "messages[0].content[0]"),
        ({"messages": [user("a"), assistant(IMAGE_BLOCK)]}, "messages[1].content[0]"),
        ({"messages": [user({"type": "image", "source": {"type": "file", "file_id": "f"}})]},
         "messages[0].content[0]"),
        ({"messages": [user({"type": "image", "source": {"type": "text", "data": "f"}})]},
         "messages[0].content[0].source.type"),
        ({"messages": [user({"type": "image", "source": {"type": "base64", "data": "?"}})]},
         "messages[0].content[0]"),
        ({"messages": [user({"type": "image", "source": {"type": "base64", "data":
         f"data:image/png;base64,{PNG}"}})]}, "messages[0].content[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"tools": [LOOK, LOOK]}, "tools[1]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ],
)  # fmt: skip
async def test_wrong_anthropic_fields_are_refused_by_name(
    ask: Asker, fields: dict[str, Any], param: str
) -> None:
    error = await ask.error(**fields)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


async def test_unknown_source_type_is_refused_with_known_ones(ask: Asker) -> None:
    wrong = {"type": "image", "source": {"type": "text", "data": "f"}}
    assert "'base64', 'url' or 'file'" in (await ask.error(user(wrong)))["message"]


async def test_anthropic_url_images_are_refused_by_default(ask: Asker) -> None:
    source = {"type": "url", "url": "https://example.org/a.png"}
    error = await ask.error(user({"type": "image", "source": source}))
    assert (error["code"], error["param"]) == ("invalid_image", "messages[0].content[0]")


async def test_count_tokens_accepts_whole_request(
    client: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    body = request(user(IMAGE_BLOCK), stream=True, tools=[LOOK], thinking={"type": "disabled"})
    answer = await client.post(COUNT_ROUTE, json=body)
    assert answer.json() == {"input_tokens": 7}
    (submit,) = engine.submitted
    assert submit.count_only
    assert submit.template.enable_thinking is False
    assert (await client.post(COUNT_ROUTE, json={"model": "demo"})).status_code == 400


async def test_unknown_anthropic_routes_and_methods_have_its_error_shape(
    client: httpx.AsyncClient,
) -> None:
    assert (await client.get(ROUTE)).json()["error"]["type"] == "invalid_request_error"
    assert (await client.post(f"{ROUTE}/drafts")).json()["error"]["type"] == "not_found_error"


async def test_long_agent_session_is_below_part_limit(ask: Asker) -> None:
    turns = [
        turn
        for i in range(1000)
        for turn in (
            assistant(text("I look."), call(f"call_{i}")),
            user(result(text("done"), call_id=f"call_{i}")),
        )
    ]
    submit = await ask.submit(user(text()), *turns, tools=[LOOK])
    assert len(submit.messages) == 2001
