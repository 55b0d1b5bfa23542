"""Tool results are matched to their calls, also after unanswered ones."""

from __future__ import annotations

import pytest

from tests.support.processor_time import processor_time
from vlm_server.errors import InvalidRequest
from vlm_server.prompt.template.chat import Chat
from vlm_server.prompt.template.templates import ChatTemplate, load_sandboxed
from vlm_server.prompt.template.tool_turns import (
    MakeId,
    given_id,
    name_results,
    numbered_id,
    short_id,
)
from vlm_server.protocol import ImagePart, Message, TextPart, ToolCall

ASK = Message("user", (TextPart("go on"),))


def calls_turn(*calls: tuple[str, str]) -> Message:
    assistant_calls = tuple(ToolCall(call_id, name, "{}") for call_id, name in calls)
    return Message("assistant", (), tool_calls=assistant_calls)


def result(call_id: str = "", name: str = "") -> Message:
    return Message("tool", (TextPart("done"),), tool_call_id=call_id, name=name)


def answered(*messages: Message, make_id: MakeId = given_id) -> list[tuple[int, str]]:
    """(index of the matched call, name) of each result; the index is -1 without a call."""
    named = name_results(messages, make_id)
    ids: list[str] = []
    found = []
    for message in named:
        ids += [call.id for call in message.tool_calls]
        if message.role == "tool":
            at = (
                len(ids) - 1 - ids[::-1].index(message.tool_call_id)
                if (message.tool_call_id in ids)
                else -1
            )
            found.append((at, message.name))
    return found


@pytest.mark.parametrize("call_id", ["", "call_0"])
def test_tool_result_matches_newest_turn_with_its_call(call_id: str):
    turns = (ASK, calls_turn((call_id, "old")), ASK, calls_turn((call_id, "new")), result(call_id))
    assert answered(*turns) == [(1, "new")]


def test_tool_results_without_ids_match_calls_by_name_and_order():
    calls = calls_turn(("", "f"), ("", "g"), ("", "f"))
    results = (result(name="g"), result(name="f"), result())
    assert answered(ASK, calls, *results) == [(0, "f"), (1, "g"), (2, "f")]


def test_tool_results_are_reordered_to_calls():
    calls = calls_turn(("a", "f"), ("b", "g"), ("c", "h"))
    results = (result("c"), result("nobody's"), result("a"), ASK, result("b"))
    assert answered(ASK, calls, *results) == [(0, "f"), (2, "h"), (-1, ""), (1, "g")]


def test_late_tool_result_matches_earlier_turn():
    turns = (ASK, calls_turn(("a", "old")), ASK, calls_turn(("b", "new")), result("a"), result("b"))
    assert answered(*turns) == [(0, "old"), (1, "new")]


@pytest.mark.parametrize("make_id", [given_id, short_id, numbered_id])
@pytest.mark.parametrize("given", ["call_0", "call_1", "call_2"])
def test_generated_call_ids_are_unique(make_id: MakeId, given: str):
    turns = (ASK, calls_turn(("", "f"), (given, "g"), ("", "h")))
    named = name_results((*turns, result(name="h"), result(given), result(name="f")), make_id)
    ids = [call.id for message in named for call in message.tool_calls]
    assert len(set(ids)) == 3
    results = [message.tool_call_id for message in named if message.role == "tool"]
    assert results == ids


@pytest.mark.parametrize("call_id", ["", "nobody's"])
def test_matching_thousands_of_tool_results_is_fast(call_id: str):
    calls = calls_turn(*((f"id {i}", "f") for i in range(13_000)))
    with processor_time() as measured:
        named = name_results((ASK, calls, *[result(call_id)] * 2_000), given_id)
    assert measured.seconds < 0.5
    assert named[2].tool_call_id == (call_id or "id 0")


def test_tool_result_without_call_gets_unused_id():
    named = name_results((ASK, calls_turn(("call_1", "f")), result(name="g")), given_id)
    assert named[-1].tool_call_id not in ("", "call_1")
    assert named[-1].name == "g"


# ---- templates -----------------------------------------------------------------------


CONVERSATION = (
    Message("system", (TextPart("be brief"),)),
    Message("user", (TextPart("before"), ImagePart(0), TextPart("after"))),
    Message("assistant", (TextPart("a circle"),)),
    Message("user", (TextPart("sure?"),)),
)
USER_PARTS = (
    "{% if m.role == 'user' and m.content is not string %}"
    "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}"
)


def render(body: str) -> str:
    template = "{% for m in messages %}[{{ m.role }}]" + body + "{% endfor %}"
    return ChatTemplate(load_sandboxed(template, {}), ("<image>",), None).render(
        Chat(CONVERSATION), str
    )


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}",
            id="parts-in-every-role",
        ),
        pytest.param(
            USER_PARTS + "{% else %}{{ m.content + '' }}{% endif %}", id="parts-of-users-only"
        ),
        pytest.param("{{ m.content + '' }}", id="strings-only"),
        pytest.param(
            "{% if m.content is string %}{{ m.content }}{% endif %}", id="parts-silently-dropped"
        ),
    ],
)
def test_content_shape_is_adapted_to_template(body: str):
    assert render(body) == (
        "[system]be brief[user]before<image>after[assistant]a circle[user]sure?"
    )


def test_template_exception_is_invalid_request():
    with pytest.raises(InvalidRequest, match="no system role"):
        render(
            "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
            "{{ m.content + '' }}"
        )
