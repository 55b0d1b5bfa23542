"""`required` calls: any split of the JSON gives the same calls, and arguments are streamed."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.processor_time import processor_time
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
    answer_parser = parser(None, None, FORCED)
    assert merged(read(answer_parser, split_at(written(calls), places))) == expected(calls)
    assert (answer_parser.calls.num_valid, answer_parser.calls.num_broken) == (len(calls), 0)


@given(CALLS, PLACES)
def test_whitespace_between_json_tokens_is_ignored(
    calls: list[tuple[str, object]], places: list[int]
):
    text = "\n" + written(calls, indent=1)
    found = merged(read(parser(None, None, FORCED), split_at(text, places)))
    assert [(name, json.loads(arguments)) for _, name, arguments in found] == calls


@given(CALLS, PLACES)
def test_required_answer_ends_after_single_allowed_call(
    calls: list[tuple[str, object]], places: list[int]
):
    answer_parser = parser(None, None, FORCED, parallel=False)
    assert merged(read(answer_parser, split_at(written(calls), places))) == expected(calls[:1])
    assert answer_parser.is_ended


def test_required_call_streams_name_and_arguments_early():
    answer_parser = parser(None, None, FORCED)
    assert answer_parser.push('[{"name": "lo') == []
    (first,) = answer_parser.push('ok"')
    assert isinstance(first, ToolCallDelta)
    assert (first.index, first.name, first.arguments) == (0, "look", "")
    assert answer_parser.push(', "arguments": ') == []
    assert answer_parser.push('{"a": "b') == [ToolCallDelta(0, arguments='{"a": "b')]
    assert answer_parser.push('\\"c"}}') == [ToolCallDelta(0, arguments='\\"c"}')]
    assert answer_parser.push(', {"name": "click", "arguments":')[0].index == 1
    assert answer_parser.push(" {}}]") == [ToolCallDelta(1, arguments="{}")]
    assert answer_parser.flush() == []


@given(CALLS, PLACES, st.integers(0, 200))
@example([("look", {"a": 1})], [], 9)
@example([("look", {}), ("click", {})], [], 48)
def test_truncated_required_calls_keep_sent_arguments(
    calls: list[tuple[str, object]], places: list[int], length: int
):
    text = written(calls)[:length]
    answer_parser = parser(None, None, FORCED)
    found = merged(read(answer_parser, split_at(text, places)))
    whole = merged(read(parser(None, None, FORCED), [text]))
    assert found == whole
    sent = [event for event in found if event[0] == "call"]
    wanted = expected(calls)
    for event, full in zip(sent, wanted, strict=False):
        assert full[2].startswith(event[2])
    assert [event[1] for event in sent] == [full[1] for full in wanted[: len(sent)]]
    assert answer_parser.calls.num_valid + answer_parser.calls.num_broken >= len(sent)
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
        answer_parser = parser(None, None, FORCED)
        assert merged(read(answer_parser, pieces)) == [("text", text)]
        assert (answer_parser.calls.num_valid, answer_parser.calls.num_broken) == (0, 1)


@pytest.mark.parametrize("rest", [" and more", ", 1]", "]]", ', {"name": 3}]'])
def test_text_after_required_call_becomes_content(rest: str):
    text = '[{"name": "look", "arguments": {"a": 1}}'
    for pieces in ([text + rest], list(text + rest)):
        answer_parser = parser(None, None, FORCED)
        first, second = merged(read(answer_parser, pieces))
        assert first == ("call", "look", '{"a": 1}')
        assert second[0] == "text"
        assert rest.endswith(second[1])
        assert (answer_parser.calls.num_valid, answer_parser.calls.num_broken) == (1, 1)


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
    answer_parser = parser(None, None, FORCED)
    with processor_time() as measured:
        read(answer_parser, [start, *[filling] * 50_000])
    assert measured.seconds < 5
