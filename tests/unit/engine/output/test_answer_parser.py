"""Parsed answers are equal for any split of their text: no part is lost, doubled or half sent."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.processor_time import processor_time
from tests.unit.engine.output.formats import (
    ANSWER,
    HERMES,
    MISTRAL,
    THINK,
    XML,
    Event,
    merged,
    parser,
    read,
    split_at,
)
from vlm_server.engine.output.answer_parser import build_parser
from vlm_server.engine.output.formats import Formats, ToolFormat
from vlm_server.engine.output.pieces import Piece, ReasoningPiece
from vlm_server.interfaces import AnswerFormat
from vlm_server.interfaces.model_spec import ReasoningFormat
from vlm_server.protocol import ToolCallDelta

ARGUMENTS = '{"a": "<think></tool_call>\\\\\\"</tool_call><tool_call>{"}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
LOOK = ("call", "look", ARGUMENTS)
BROKEN = "<tool_call>look <think> there</tool_call>"
UNKNOWN = '<tool_call>{"name": "jump", "arguments": {}}</tool_call>'

SEGMENT = (
    st.tuples(
        st.just("text"),
        st.lists(st.sampled_from([*"ab< \n", "<tool", "<thin", "</think", "</tool_call>"])).map(
            "".join
        ),
    )
    | st.tuples(st.just("thought"), st.text("ab< \n", max_size=5))
    | st.just(("call", CALL))
    | st.sampled_from([("broken", BROKEN), ("broken", UNKNOWN)])
)
PLACES = st.lists(st.integers(0, 300), max_size=40)


def written(segments: list[tuple[str, str]]) -> str:
    texts = {"thought": "<think>{}</think>"}
    return "".join(texts.get(kind, "{}").format(text) if kind == "thought" else text
                   for kind, text in segments)  # fmt: skip


def expected(segments: list[tuple[str, str]]) -> list[Event]:
    """By the rules for blanks: alone beside a mark they are dropped, after a thought's always."""
    events: list[Event] = []
    held, before = "", ""  # a stretch of content, and the mark before it
    for kind, text in [*segments, ("end", "")]:
        if kind == "thought" and held.strip():
            kind, text = "text", f"<think>{text}</think>"  # amid content its marks are none
        if kind in ("text", "broken"):
            held += text
            continue
        if before == "thought":
            held = held.lstrip()
        is_beside_mark = bool(before) or kind != "end"
        if held.strip() or (held and not is_beside_mark):
            events.append(("text", held))
        held, before = "", kind
        if kind == "thought" and text.strip():
            events.append(("thought", text.lstrip()))
        elif kind == "call":
            events.append(LOOK)
    joined: list[Event] = []
    for event in events:
        if joined and event[0] == joined[-1][0] != "call":
            event = (event[0], joined.pop()[1] + event[1])
        joined.append(event)
    return joined


@given(st.lists(SEGMENT, max_size=6), PLACES)
@example([("text", "a"), ("call", CALL), ("text", "\n"), ("call", CALL), ("text", "b")], [])
@example([("text", "\n"), ("broken", BROKEN), ("text", "\n")], [])
@example([("text", " "), ("thought", "a"), ("text", "\n\n"), ("call", CALL)], [3, 5])
def test_parsed_answer_is_independent_of_its_split(
    segments: list[tuple[str, str]], places: list[int]
):
    text_parser = parser()
    assert merged(read(text_parser, split_at(written(segments), places))) == expected(segments)
    kinds = [kind for kind, _ in segments]
    assert (text_parser.calls.num_valid, text_parser.calls.num_broken) == (
        kinds.count("call"),
        kinds.count("broken"),
    )


@pytest.mark.parametrize(
    "tools", [HERMES, XML, MISTRAL, None], ids=["hermes", "xml", "mistral", "no tools"]
)
@given(
    text=st.lists(
        st.sampled_from(
            [*"a<[ \n", "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", CALL,
             '[{"name": "look", "arguments": {}}]', "<function=look></function>"]
        ),
        max_size=12,
    ).map("".join),
    places=PLACES,
    starts=st.booleans(),
)  # fmt: skip
def test_arbitrary_text_is_parsed_equally_for_any_split(
    tools: ToolFormat | None, text: str, places: list[int], starts: bool
):
    def events(pieces: list[str]) -> list[Event]:
        return merged(read(parser(tools, starts_in_reasoning=starts), pieces))

    whole = events([text])
    assert events(split_at(text, places)) == whole
    assert events(list(text)) == whole


@given(st.lists(SEGMENT, max_size=5), st.integers(0, 300))
def test_parser_never_sends_part_of_mark(segments: list[tuple[str, str]], length: int):
    """What is sent of a beginning is how all of it begins, but for a call that is cut off."""
    text = written(segments)
    text_parser = parser()
    sent = merged(piece for letter in text[:length] for piece in text_parser.push(letter))
    whole = expected(segments)
    for event, full in zip(sent, whole, strict=False):
        assert event[0] == full[0]
        assert full[-1].startswith(event[-1])
    assert len(sent) <= len(whole)


# ---- calls ---------------------------------------------------------------------------


def test_tool_call_is_sent_once_it_is_complete():
    text_parser = parser()
    *before, last = CALL
    assert [piece for letter in before for piece in text_parser.push(letter)] == []
    first, second = text_parser.push(last)
    assert isinstance(first, ToolCallDelta)
    assert isinstance(second, ToolCallDelta)
    assert (first.index, first.name, first.arguments) == (0, "look", "")
    assert second == ToolCallDelta(0, arguments=ARGUMENTS)


def test_tool_call_ids_are_random_and_fit_template():
    def first_id(pieces: list[Piece]) -> str:
        assert isinstance(pieces[0], ToolCallDelta)
        return pieces[0].id

    ids = {first_id(read(parser(), [CALL])) for _ in range(20)}
    assert len(ids) == 20
    assert all(re.fullmatch("call_[A-Za-z0-9]{24}", one) for one in ids)
    line = '[TOOL_CALLS][{"name": "look", "arguments": {}}]'
    assert re.fullmatch("[A-Za-z0-9]{9}", first_id(read(parser(MISTRAL), [line])))


def test_xml_call_is_read_to_its_end_mark():
    text = (
        "I look.\n<tool_call>\n<function=look>\n<parameter=at>\n<a>\nb</a>\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    wanted = [("text", "I look.\n"), ("call", "look", json.dumps({"at": "<a>\nb</a>"}))]
    for pieces in ([text], list(text)):
        assert merged(read(parser(XML), pieces)) == wanted


LINE = '[TOOL_CALLS][{"name": "look", "arguments": {}}, {"name": "click", "arguments": {"x": 1}}]'
LINE_CALLS: list[Event] = [("call", "look", "{}"), ("call", "click", '{"x": 1}')]
PRETTY = json.dumps([{"name": "look", "arguments": {"a": "[TOOL_CALLS] }]\n\\"}}], indent=1)
PRETTY_CALL = ("call", "look", json.dumps({"a": "[TOOL_CALLS] }]\n\\"}))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (LINE, LINE_CALLS),
        (f"a {LINE}\n b", [("text", "a "), *LINE_CALLS, ("text", "\n b")]),
        (f"{LINE}{LINE}", LINE_CALLS * 2),
        (f"{LINE}\n{LINE}\n", LINE_CALLS * 2),
        ("[TOOL_CALLS][{\nb", [("text", "[TOOL_CALLS][{\nb")]),
        (f"[TOOL_CALLS]x{LINE}", [("text", "[TOOL_CALLS]x"), *LINE_CALLS]),
        ("[TOOL_CALLS]", [("text", "[TOOL_CALLS]")]),
        (LINE[:-1], [("text", LINE[:-1])]),
        (f"[TOOL_CALLS]{PRETTY}", [PRETTY_CALL]),
        (f"a [TOOL_CALLS] {PRETTY} b", [("text", "a "), PRETTY_CALL, ("text", " b")]),
        (f"[TOOL_CALLS]{PRETTY}[TOOL_CALLS]{PRETTY}\n", [PRETTY_CALL] * 2),
        (f"[TOOL_CALLS]\n{PRETTY}", [("text", f"[TOOL_CALLS]\n{PRETTY}")]),
        ('[TOOL_CALLS][{"a\nb', [("text", '[TOOL_CALLS][{"a\nb')]),
    ],
)
def test_calls_without_end_mark_end_with_their_json(text: str, wanted: list[Event]):
    for pieces in ([text], list(text)):
        assert merged(read(parser(MISTRAL), pieces)) == wanted


WRITTEN = "<function=look>\n<parameter=at>\n{}\n</parameter>\n</function>\n"


@pytest.mark.parametrize(
    "value", ["a </tool_call> b", "</tool_call>" * 9, "<tool_call></tool_call>\n", "</function>"]
)
def test_end_mark_in_xml_argument_is_text(value: str):
    text = f"<tool_call>\n{WRITTEN.format(value)}</tool_call>"
    wanted = [("call", "look", json.dumps({"at": value}))] * 2
    for pieces in ([text, text], list(text + text)):
        assert merged(read(parser(XML), pieces)) == wanted


def test_incomplete_call_does_not_swallow_next_call():
    call = f"<tool_call>{WRITTEN.format('a')}</tool_call>"
    cut = "<tool_call><function=look>\n<parameter=at>\nb</tool_call> Sorry. "
    wanted = [("text", cut), ("call", "look", '{"at": "a"}')]
    for pieces in ([cut + call], list(cut + call)):
        text_parser = parser(XML)
        assert merged(read(text_parser, pieces)) == wanted
        assert text_parser.calls.num_broken == 1
    cut = '<tool_call>{"name": "look </tool_call>\nSorry.\n'
    for pieces in ([cut + CALL], list(cut + CALL)):
        assert merged(read(parser(), pieces)) == [("text", cut), LOOK]


def test_broken_json_string_is_sent_as_text_at_once():
    broken = '<tool_call>{"name": "look", "arguments": {"a": "b\nc"}}</tool_call>'
    text_parser = parser()
    assert merged(text_parser.push(broken)) == [("text", broken)]


@pytest.mark.parametrize(
    "broken",
    [
        BROKEN,
        UNKNOWN,
        "<tool_call></tool_call>",
        '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "look"}</tool_call>',
        '<tool_call>{"name": ["look"], "arguments": {}}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        '<tool_call>{"name": "look", "arguments": {}}',
        CALL[:-1],
        "<tool_call>",
    ],
)
def test_broken_call_becomes_text_as_generated(broken: str):
    text_parser = parser()
    assert merged(read(text_parser, [f"\n {CALL} ", broken])) == [LOOK, ("text", " " + broken)]
    assert (text_parser.calls.num_valid, text_parser.calls.num_broken) == (1, 1)


def test_list_with_invalid_call_becomes_text():
    text = '[TOOL_CALLS][{"name": "look", "arguments": {}}, {"name": "jump", "arguments": {}}]'
    assert merged(read(parser(MISTRAL), [text])) == [("text", text)]


@pytest.mark.parametrize("tools", [HERMES, MISTRAL], ids=["hermes", "mistral"])
def test_answer_ends_after_first_call_without_parallel_calls(tools: ToolFormat):
    line = f"{LINE}\nmore" if tools is MISTRAL else f"{CALL}{CALL} more"
    wanted = LINE_CALLS[:1] if tools is MISTRAL else [LOOK]
    for pieces in ([line], list(line)):
        text_parser = parser(tools, parallel=False)
        assert merged(read(text_parser, pieces)) == wanted
        assert text_parser.is_ended
        assert text_parser.calls.num_valid == 1


def test_broken_call_does_not_count_as_single_call():
    text_parser = parser(parallel=False)
    assert merged(read(text_parser, [BROKEN, CALL, CALL])) == [("text", BROKEN), LOOK]


def test_calls_are_plain_text_in_requests_without_tools():
    text_parser = parser(answer=AnswerFormat())
    assert merged(read(text_parser, ["a", CALL])) == [("text", "a" + CALL)]
    assert build_parser(Formats(HERMES), AnswerFormat(), is_json=False) is None
    assert build_parser(Formats(), ANSWER, is_json=False) is None


def test_marks_in_json_arguments_are_text():
    text_parser = parser(is_json=True)
    text = '{"a": "<think>b</think><tool_call>"}'
    assert merged(read(text_parser, list(f"<think>hm</think>\n{text}"))) == [
        ("thought", "hm"),
        ("text", text),
    ]
    assert merged(read(parser(is_json=True), [f"{CALL}\n{CALL}"])) == [LOOK, LOOK]


# ---- thoughts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "starts", "wanted"),
    [
        ("hm</think>\n\nyes", True, [("thought", "hm"), ("text", "yes")]),
        ("\nhm\n</think>yes", True, [("thought", "hm\n"), ("text", "yes")]),
        ("<think>\nhm</think>yes", False, [("thought", "hm"), ("text", "yes")]),
        (" \n<think>hm</think>yes", False, [("thought", "hm"), ("text", "yes")]),
        ("<think>\n\n</think>\n\nyes", False, [("text", "yes")]),
        ("hm", True, [("thought", "hm")]),
        ("<think>hm</thi", False, [("thought", "hm</thi")]),
        ("yes", False, [("text", "yes")]),
        (" yes ", False, [("text", " yes ")]),
        ("\n", False, [("text", "\n")]),
        ("a<think>b</think>c", False, [("text", "a<think>b</think>c")]),
        ("hm</think>a <think> b", True, [("thought", "hm"), ("text", "a <think> b")]),
        ("<think>a</think> <think>b</think>c", False, [("thought", "ab"), ("text", "c")]),
        (f"{CALL}\n<think>b</think>c", False, [LOOK, ("thought", "b"), ("text", "c")]),
        (f"a <think> b {CALL}", False, [("text", "a <think> b "), LOOK]),
        (f"{BROKEN}<think>b", False, [("text", f"{BROKEN}<think>b")]),
        ("a</think>c", False, [("text", "a</think>c")]),
        ("<think>a<tool_call>b", False, [("thought", "a<tool_call>b")]),
    ],
)
def test_reasoning_is_separated_from_text(text: str, starts: bool, wanted: list[Event]):
    for pieces in ([text], list(text)):
        assert merged(read(parser(starts_in_reasoning=starts), pieces)) == wanted


@pytest.mark.parametrize(
    ("pieces", "starts", "num_tokens"),
    [
        (["hm", " so", "</think>", "yes"], True, 3),
        (["<think>", "hm", "</think>", "\n\n", "yes"], False, 3),
        (["\n", "<th", "ink", ">", "hm", "</th", "ink>", "yes"], False, 6),
        (["a", "<th", "ink", ">", "hm", "</th", "ink>", "yes"], False, 0),
        (["a", "<th", "is", "yes"], False, 0),
        (["<th", "<th", "ink>", "</think>"], False, 0),
        (["<think>hm</think>yes", "no"], False, 1),
        (["<think>", "hm"], False, 2),
        (["hm", ""], True, 2),
    ],
)
def test_reasoning_tokens_are_counted_with_their_marks(
    pieces: list[str], starts: bool, num_tokens: int
):
    text_parser = parser(starts_in_reasoning=starts)
    read(text_parser, pieces)
    assert text_parser.num_reasoning_tokens == num_tokens


def test_held_back_text_is_never_longer_than_mark():
    text_parser = parser()
    assert text_parser.push(" <thin") == []
    assert merged(text_parser.push("g <thin")) == [("text", " <thing <thin")]
    assert merged(text_parser.push("g <tool_c")) == [("text", "g ")]
    assert merged(text_parser.push("lass>")) == [("text", "<tool_class>")]
    text_parser = parser()
    assert text_parser.push("<think>hm</thi") == [ReasoningPiece("hm")]
    assert text_parser.push("s") == [ReasoningPiece("</this")]


HARMONY = ReasoningFormat(
    "<a><m>", "<e>", headers=("<s>assistant", "<c>final<m>", "<c>commentary<m>")
)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<a><m>hm<e><s>assistant<c>final<m>Yes", [("thought", "hm"), ("text", "Yes")]),
        ("<c>final<m>Yes", [("text", "Yes")]),
        (f"<a><m>hm<e><s>assistant{CALL}", [("thought", "hm"), LOOK]),
        (
            "<c>commentary<m>I look.<e><s>assistant<a><m>hm<e><s>assistant<c>final<m> Yes",
            [("text", "I look."), ("thought", "hm"), ("text", "Yes")],
        ),
        ("An assistant<c>final", [("text", "An assistantfinal")]),
    ],
)
def test_message_headers_are_not_shown(text: str, wanted: list[Event]):
    pieces = re.findall("<[a-z]>|.", text, re.DOTALL)
    assert read_control(pieces, reasoning=HARMONY) == wanted


# ---- control tokens ------------------------------------------------------------------


def read_control(pieces: list[str], **changes: object) -> list[Event]:
    """As if every piece in the shape <...> were a control token."""
    text_parser = parser(**changes)  # type: ignore[arg-type]
    found = list[Piece]()
    for piece in pieces:
        text_parser.announce(piece, len(piece) if re.fullmatch("<.+>", piece) else 0)
    for piece in pieces:
        found += text_parser.push(piece)
    return merged([*found, *text_parser.flush()])


def test_control_tokens_are_read_as_marks_or_hidden():
    body = '{"name": "look", "arguments": {}}'
    assert read_control(
        [
            "a",
            "<x>",
            "b",
            "<tool_call>",
            body,
            "</tool_call>",
            "<x>",
            "<think>",
            "c",
            "<x>",
            "</think>",
        ]
    ) == [("text", "ab"), ("call", "look", "{}"), ("thought", "c")]
    assert read_control(["</tool_call>", "a", "</think>"]) == [("text", "a")]


def test_control_tokens_of_broken_call_become_text():
    assert read_control(["a", "<tool_call>", "b", "<x>", "c", "</tool_call>", "<x>", "d"]) == [
        ("text", "a<tool_call>b<x>c</tool_call>d")
    ]
    assert read_control(["<tool_call>", "b"]) == [("text", "<tool_call>b")]


# ---- time ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tools", "start"),
    [
        (HERMES, "<tool_call>"),
        (HERMES, '<tool_call>{"a": "'),
        (HERMES, "<think>"),
        (HERMES, ""),
        (MISTRAL, "[TOOL_CALLS]"),
        (MISTRAL, "[TOOL_CALLS]["),
        (XML, "<tool_call><function=look>"),
    ],
)
@pytest.mark.parametrize(
    "count", [1000, pytest.param(50_000, marks=pytest.mark.alone)], ids=["short", "long"]
)
def test_answer_parsing_takes_linear_time(tools: ToolFormat, start: str, count: int):
    for filling in ("abcd", "    ", "</to", "<<<<", "</tool_call>", "[\n{", '\\"'):
        text_parser = parser(tools)
        with processor_time() as measured:
            found = merged(read(text_parser, [start, *[filling] * count]))
        assert measured.seconds < count / 10_000, filling
        shown = sum(len(event[1]) for event in found)
        assert shown >= (0 if start == "<think>" else 2 * count), filling


def test_call_is_complete_at_end_of_answer():
    text_parser = parser()
    text_parser.push(CALL.removesuffix("</tool_call>"))
    assert merged(text_parser.flush("</tool_call>")) == [LOOK]
    text_parser = parser()
    text_parser.push(CALL.removesuffix("</tool_call>"))
    assert text_parser.flush("<|end|>") == [CALL.removesuffix("</tool_call>")]
    assert THINK.end
