"""Stop strings: the text ends at the same place for any split, and no part of a stop is sent."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st

from vlm_server.engine.output.stops import StopChecker

SHORT = st.text("abc", max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple)


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    checker = StopChecker(stops)
    emitted = ""
    for piece in pieces:
        text, is_stopped = checker.push(piece)
        emitted += text
        if is_stopped:
            return emitted, True
    return emitted + checker.flush(), False


def expected(stops: tuple[str, ...], text: str) -> tuple[str, bool]:
    """Read letter by letter: the stop that is complete first ends the text where it begins."""
    for end in range(1, len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)], True
    return text, False


def cut(text: str, snapshot_points: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(b % (len(text) + 1) for b in snapshot_points)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(STOPS, SHORT, st.lists(st.integers(0, 50), max_size=6))
@example(("abca", "b"), "abca", [])
@example(("abcc", "bc"), "abcc", [3])
@example(("aab",), "aaab", [2])
def test_stop_string_position_is_independent_of_text_split(
    stops: tuple[str, ...], text: str, snapshot_points: list[int]
):
    assert run(stops, cut(text, snapshot_points)) == expected(stops, text)


@given(STOPS, st.lists(SHORT, max_size=6))
def test_emitted_text_is_always_prefix_of_answer(stops: tuple[str, ...], pieces: list[str]):
    checker = StopChecker(stops)
    final, _ = expected(stops, "".join(pieces))
    emitted = ""
    for piece in pieces:
        text, is_stopped = checker.push(piece)
        emitted += text
        assert final.startswith(emitted)
        if is_stopped:
            break


def test_possible_stop_string_is_held_back_until_decided():
    checker = StopChecker(("END",))
    assert checker.push("the EN") == ("the ", False)
    assert checker.push("TRY") == ("ENTRY", False)


def test_text_that_cannot_begin_stop_string_is_not_held_back():
    checker = StopChecker(("END",))
    assert checker.push("the ENx") == ("the ENx", False)


def test_first_completed_stop_string_is_named():
    checker = StopChecker(("later", "now", "no"))
    checker.push("first n")
    assert checker.reached is None
    checker.push("ow later")
    assert checker.reached == "no"


def test_flush_returns_held_text_only_once():
    checker = StopChecker(("END",))
    assert checker.push("E") == ("", False)
    assert checker.flush() == "E"
    assert checker.flush() == ""


def test_text_passes_unchanged_without_stop_strings():
    assert StopChecker(()).push("anything") == ("anything", False)
