"""Stop strings: the same cut for every way in which the text may arrive, and no part of one."""

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
def test_the_cut_does_not_depend_on_how_the_text_arrives(
    stops: tuple[str, ...], text: str, snapshot_points: list[int]
):
    assert run(stops, cut(text, snapshot_points)) == expected(stops, text)


@given(STOPS, st.lists(SHORT, max_size=6))
def test_what_is_emitted_never_has_to_be_taken_back(stops: tuple[str, ...], pieces: list[str]):
    checker = StopChecker(stops)
    final, _ = expected(stops, "".join(pieces))
    emitted = ""
    for piece in pieces:
        text, is_stopped = checker.push(piece)
        emitted += text
        assert final.startswith(emitted)
        if is_stopped:
            break


def test_a_possible_stop_is_held_back_and_given_when_it_is_none():
    checker = StopChecker(("END",))
    assert checker.push("the EN") == ("the ", False)
    assert checker.push("TRY") == ("ENTRY", False)


def test_nothing_is_held_that_can_not_begin_a_stop():
    checker = StopChecker(("END",))
    assert checker.push("the ENx") == ("the ENx", False)


def test_the_stop_that_was_complete_first_is_named():
    checker = StopChecker(("later", "now", "no"))
    checker.push("first n")
    assert checker.reached is None
    checker.push("ow later")
    assert checker.reached == "no"


def test_flush_gives_what_was_held_once():
    checker = StopChecker(("END",))
    assert checker.push("E") == ("", False)
    assert checker.flush() == "E"
    assert checker.flush() == ""


def test_without_stops_text_passes():
    assert StopChecker(()).push("anything") == ("anything", False)
