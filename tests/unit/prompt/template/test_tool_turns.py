"""Results find the calls that they are of, whatever was never answered before."""

from __future__ import annotations

import pytest

from tests.processor_time import processor_time
from vlm_server.prompt.template.tool_turns import (
    MakeId,
    given_id,
    name_results,
    numbered_id,
    short_id,
)
from vlm_server.protocol import Message, TextPart, ToolCall

ASK = Message("user", (TextPart("go on"),))


def called(*calls: tuple[str, str]) -> Message:
    made = tuple(ToolCall(call_id, name, "{}") for call_id, name in calls)
    return Message("assistant", (), tool_calls=made)


def result(call_id: str = "", name: str = "") -> Message:
    return Message("tool", (TextPart("done"),), tool_call_id=call_id, name=name)


def answered(*messages: Message, make_id: MakeId = given_id) -> list[tuple[int, str]]:
    """(number of the call that the conversation has, its name) of each result; -1: of none."""
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
def test_a_result_is_of_the_newest_turn_that_has_such_a_call(call_id: str):
    turns = (ASK, called((call_id, "old")), ASK, called((call_id, "new")), result(call_id))
    assert answered(*turns) == [(1, "new")]


def test_calls_of_one_turn_are_answered_as_they_came():
    calls = called(("", "f"), ("", "g"), ("", "f"))
    results = (result(name="g"), result(name="f"), result())
    assert answered(ASK, calls, *results) == [(0, "f"), (1, "g"), (2, "f")]


def test_results_are_in_the_order_of_their_calls():
    calls = called(("a", "f"), ("b", "g"), ("c", "h"))
    results = (result("c"), result("nobody's"), result("a"), ASK, result("b"))
    assert answered(ASK, calls, *results) == [(0, "f"), (2, "h"), (-1, ""), (1, "g")]


def test_a_late_result_finds_an_earlier_turn():
    turns = (ASK, called(("a", "old")), ASK, called(("b", "new")), result("a"), result("b"))
    assert answered(*turns) == [(0, "old"), (1, "new")]


@pytest.mark.parametrize("make_id", [given_id, short_id, numbered_id])
@pytest.mark.parametrize("given", ["call_0", "call_1", "call_2"])
def test_ids_that_are_made_are_not_those_of_others(make_id: MakeId, given: str):
    turns = (ASK, called(("", "f"), (given, "g"), ("", "h")))
    named = name_results((*turns, result(name="h"), result(given), result(name="f")), make_id)
    ids = [call.id for message in named for call in message.tool_calls]
    assert len(set(ids)) == 3
    results = [message.tool_call_id for message in named if message.role == "tool"]
    assert results == ids


@pytest.mark.parametrize("call_id", ["", "nobody's"])
def test_thousands_of_calls_and_results_take_no_time(call_id: str):
    calls = called(*((f"id {i}", "f") for i in range(13_000)))
    with processor_time() as measured:
        named = name_results((ASK, calls, *[result(call_id)] * 2_000), given_id)
    assert measured.seconds < 0.5
    assert named[2].tool_call_id == (call_id or "id 0")


def test_a_result_of_no_call_has_an_id_of_its_own():
    named = name_results((ASK, called(("call_1", "f")), result(name="g")), given_id)
    assert named[-1].tool_call_id not in ("", "call_1")
    assert named[-1].name == "g"
