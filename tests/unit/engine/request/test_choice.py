"""The text of one choice for any tokens, stops and limits: emitted text is final and complete."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.engine.fakes import EOS, SPECIAL, ByteDecoder, MarkDecoder
from tests.unit.engine.output.formats import FORCED, Event, merged, parser
from vlm_server.engine.output.answer_parser import AnswerParser
from vlm_server.engine.output.pieces import Piece, ReasoningPiece
from vlm_server.engine.request.choice import Choice
from vlm_server.protocol import SamplingParams

CHARACTERS = "aab é€😀"
TEXT_IDS = st.text(CHARACTERS, max_size=12).map(lambda text: [*text.encode()])
IDS = st.lists(st.sampled_from([ord("a"), ord("b"), 0xE2, 0x82, 0xAC, 0xFF, SPECIAL]), max_size=10)
STOPS = st.lists(st.text(CHARACTERS, min_size=1, max_size=4), max_size=4).map(tuple)


def answer(stops: tuple[str, ...], ids: list[int], max_tokens: int) -> tuple[list[str], Choice]:
    """The emitted texts of `ids` and an end token, up to the end of the choice."""
    choice = Choice(SamplingParams(stop=stops), ByteDecoder())
    pieces = []
    for token_id in [*ids, EOS]:
        (piece,) = choice.append_token(token_id, frozenset({EOS}), max_tokens)
        assert isinstance(piece, str)
        pieces.append(piece)
        if choice.finish_reason:
            return pieces, choice
    raise AssertionError("the end token did not end it")


def expected(stops: tuple[str, ...], ids: list[int], max_tokens: int) -> tuple[str, str]:
    """(text, finish reason): the whole text, read letter by letter up to the first stop."""
    whole = ByteDecoder().decode(ids[:max_tokens])
    for end in range(1, len(whole) + 1):
        begins = [end - len(stop) for stop in stops if whole[:end].endswith(stop)]
        if begins:
            return whole[: min(begins)], "stop"
    return whole, "length" if len(ids) >= max_tokens else "stop"


@given(STOPS, TEXT_IDS | IDS, st.integers(1, 20))
@example(("é€", "a é"), [*"a é€".encode()], 20)
@example(("ab", "€"), [*"a€".encode()][:-1], 3)
@example(("b😀", "aab"), [*"aab😀".encode()], 7)
def test_choice_text_is_cut_exactly_at_first_stop_string(
    stops: tuple[str, ...], ids: list[int], max_tokens: int
):
    pieces, choice = answer(stops, ids, max_tokens)
    assert ("".join(pieces), choice.finish_reason) == expected(stops, ids, max_tokens)
    assert choice.num_generated == len(pieces)


@given(TEXT_IDS)
def test_choice_pieces_never_split_character(ids: list[int]):
    pieces, _ = answer((), ids, 1000)
    assert not [piece for piece in pieces if "\ufffd" in piece]


@given(STOPS, TEXT_IDS)
def test_choice_holds_back_only_possible_stop_strings(stops: tuple[str, ...], ids: list[int]):
    """Held back is the longest end that some stop begins with, and no more."""
    choice = Choice(SamplingParams(stop=stops), ByteDecoder())
    emitted = ""
    for number, token_id in enumerate(ids, 1):
        emitted += "".join(map(str, choice.append_token(token_id, frozenset({EOS}), 1000)))
        if choice.finish_reason:
            return
        text = bytes(ids[:number]).decode(errors="ignore")
        held = text[len(emitted) :]
        assert not held or any(stop.startswith(held) for stop in stops)


MARKS = MarkDecoder("<tool_call>", "</tool_call>", "<think>", "</think>", "<other>")
MARKED_TEXT = st.lists(
    st.sampled_from(
        [*"ab <\n", "<tool_call>", "</tool_call>", "<think>", "</think>", "<other>", "<oth",
         '<tool_call>{"name": "look", "arguments": {}}</tool_call>']
    ),
    max_size=10,
).map("".join)  # fmt: skip


def stopped(stops: tuple[str, ...], events: list[Event]) -> tuple[list[Event], str | None]:
    """The emitted part of an answer's `events`, and the stop string that ends it."""
    emitted: list[Event] = []
    for event in events:
        if event[0] == "call":
            emitted.append(event)
            continue
        text, reason = expected(stops, [*event[1].encode()], 1000)
        if text:
            emitted.append((event[0], text))
        if reason == "stop" and text != event[1]:
            return emitted, event[1]
    return emitted, None


def read_answer(
    text: str, stops: tuple[str, ...], text_parser: AnswerParser
) -> tuple[list[Event], Choice]:
    """All deltas of an answer that comes token by token."""
    choice = Choice(SamplingParams(stop=stops), MARKS)
    choice.set_parser(text_parser)
    found = list[Piece]()
    for token_id in [*MARKS.encode(text), EOS]:
        found += choice.append_token(token_id, frozenset({EOS}), 1000)
        if choice.finish_reason:
            break
    return merged(piece for piece in found if piece not in ("", ReasoningPiece(""))), choice


@given(MARKED_TEXT, st.lists(st.sampled_from(["a<", "b", "</tool_call>", "ba"]), max_size=2))
@example("a<other>b<tool_call>x<other></tool_call><other>c", [])
@example("<other>a<other>b", ["a<"])
@example("<think>a</think>b", ["ab", "ba"])
def test_stop_strings_end_content_and_reasoning(text: str, stops: list[str]):
    """As if all of the answer had come at once, without any."""
    all_emitted, unstopped = read_answer(text, (), parser())
    emitted, end = stopped(tuple(stops), all_emitted)
    found, choice = read_answer(text, tuple(stops), parser())
    assert found == emitted
    assert (choice.stop is None) == (end is None)
    if end is None:
        assert choice.finish_reason == unstopped.finish_reason
        assert choice.num_tool_calls == unstopped.num_tool_calls
        assert choice.num_broken_tool_calls == unstopped.num_broken_tool_calls
    else:
        has_call = any(event[0] == "call" for event in emitted)
        assert choice.finish_reason == ("tool_calls" if has_call else "stop")


STOPS_IN_CALLS = ("}", '"', "look", "\n", "</tool_call>", "arguments")


def test_stop_string_in_call_is_its_text():
    text = '<tool_call>\n{"name": "look", "arguments": {"a": "b"}}\n</tool_call>'
    found, choice = read_answer(text, STOPS_IN_CALLS, parser())
    assert found == [("call", "look", '{"a": "b"}')]
    assert (choice.finish_reason, choice.stop) == ("tool_calls", None)
    text = '[{"name": "look", "arguments": {"a": "b"}}]'
    found, choice = read_answer(text, STOPS_IN_CALLS, parser(None, None, FORCED))
    assert found == [("call", "look", '{"a": "b"}')]
    assert (choice.finish_reason, choice.stop) == ("tool_calls", None)
