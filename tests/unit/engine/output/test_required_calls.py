"""Calls by force: any split of the JSON gives the same calls, and arguments go on as they come."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.processor_time import processor_time
from tests.unit.engine.output.formats import FORCED, Event, merged, parser, read, split_at
from vlm_server.protocol import ToolCallDelta

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\{}[],é😀\n', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('k"}'), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text('ab"\\}', max_size=4), VALUES, max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(["look", "click"]), OBJECTS), min_size=1, max_size=3)
PLACES = st.lists(st.integers(0, 200), max_size=40)


def written(calls: list[tuple[str, object]], **style: object) -> str:
    listed = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return json.dumps(listed, **style)  # type: ignore[arg-type]


def expected(calls: list[tuple[str, object]]) -> list[Event]:
    return [("call", name, json.dumps(arguments)) for name, arguments in calls]


@given(CALLS, PLACES)
def test_required_calls_are_equal_for_any_split(calls: list[tuple[str, object]], places: list[int]):
    made = parser(None, None, FORCED)
    assert merged(read(made, split_at(written(calls), places))) == expected(calls)
    assert (made.calls.num_valid, made.calls.num_broken) == (len(calls), 0)


@given(CALLS, PLACES)
def test_whitespace_between_json_tokens_is_ignored(
    calls: list[tuple[str, object]], places: list[int]
):
    text = "\n" + written(calls, indent=1)
    found = merged(read(parser(None, None, FORCED), split_at(text, places)))
    assert [(name, json.loads(arguments)) for _, name, arguments in found] == calls


@given(CALLS, PLACES)
def test_required_answer_ends_after_a_single_allowed_call(
    calls: list[tuple[str, object]], places: list[int]
):
    made = parser(None, None, FORCED, parallel=False)
    assert merged(read(made, split_at(written(calls), places))) == expected(calls[:1])
    assert made.is_ended


def test_required_call_streams_name_and_arguments_early():
    made = parser(None, None, FORCED)
    assert made.push('[{"name": "lo') == []
    (first,) = made.push('ok"')
    assert isinstance(first, ToolCallDelta)
    assert (first.index, first.name, first.arguments) == (0, "look", "")
    assert made.push(', "arguments": ') == []
    assert made.push('{"a": "b') == [ToolCallDelta(0, arguments='{"a": "b')]
    assert made.push('\\"c"}}') == [ToolCallDelta(0, arguments='\\"c"}')]
    assert made.push(', {"name": "click", "arguments":')[0].index == 1
    assert made.push(" {}}]") == [ToolCallDelta(1, arguments="{}")]
    assert made.flush() == []


@given(CALLS, PLACES, st.integers(0, 200))
@example([("look", {"a": 1})], [], 9)
@example([("look", {}), ("click", {})], [], 48)
def test_truncated_required_calls_keep_sent_arguments(
    calls: list[tuple[str, object]], places: list[int], length: int
):
    text = written(calls)[:length]
    made = parser(None, None, FORCED)
    found = merged(read(made, split_at(text, places)))
    whole = merged(read(parser(None, None, FORCED), [text]))
    assert found == whole
    sent = [event for event in found if event[0] == "call"]
    wanted = expected(calls)
    for event, full in zip(sent, wanted, strict=False):
        assert full[2].startswith(event[2])
    assert [event[1] for event in sent] == [full[1] for full in wanted[: len(sent)]]
    assert made.calls.num_valid + made.calls.num_broken >= len(sent)
    texts = "".join(event[1] for event in found if event[0] == "text")
    assert texts == ("" if sent else text), "half a call is text only if it is all there is"


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        "{}",
        "[]",
        '[{"name": "unknown", "arguments": {}}]',
        '[{"name": 1, "arguments": {}}]',
        '[{"nome": "look", "arguments": {}}]',
        '[{"name": "' + "x" * 500,
        '[{"name": "\\x", "arguments": {}}]',
    ],
)
def test_invalid_required_call_becomes_content(text: str):
    for pieces in ([text], list(text)):
        made = parser(None, None, FORCED)
        assert merged(read(made, pieces)) == [("text", text)]
        assert (made.calls.num_valid, made.calls.num_broken) == (0, 1)


@pytest.mark.parametrize("rest", [" and more", ", 1]", "]]", ', {"name": 3}]'])
def test_text_after_a_required_call_becomes_content(rest: str):
    text = '[{"name": "look", "arguments": {"a": 1}}'
    for pieces in ([text + rest], list(text + rest)):
        made = parser(None, None, FORCED)
        first, second = merged(read(made, pieces))
        assert first == ("call", "look", '{"a": 1}')
        assert second[0] == "text"
        assert rest.endswith(second[1])
        assert (made.calls.num_valid, made.calls.num_broken) == (1, 1)


def test_required_call_may_follow_reasoning():
    text = '<think>hm [</think>\n[{"name": "look", "arguments": {"a": "<think>"}}]'
    for pieces in ([text], list(text)):
        assert merged(read(parser(answer=FORCED), pieces)) == [
            ("thought", "hm ["),
            ("call", "look", '{"a": "<think>"}'),
        ]


@pytest.mark.parametrize("start", ['[{"name": "look", "arguments": {"a": "', '[{"name": "', "["])
@pytest.mark.parametrize("filling", ["abc\\", "    ", "[[{{"])
def test_required_calls_are_parsed_in_linear_time(start: str, filling: str):
    made = parser(None, None, FORCED)
    with processor_time() as measured:
        read(made, [start, *[filling] * 50_000])
    assert measured.seconds < 5
