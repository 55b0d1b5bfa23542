"""Marks are found for any split of the text, and other text is never held back."""

from hypothesis import given
from hypothesis import strategies as st

from vlm_server.engine.output.pieces import Marks

MARKS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3)
TEXTS = st.text("ab<", max_size=12)


def split(marks: Marks, pieces: list[str]) -> list[tuple[str, str]]:
    """(text, the mark after it), of the joined pieces."""
    found, held, text = [], "", ""
    for number, piece in enumerate([*pieces, ""]):
        held += piece
        while True:
            length, mark = marks.find(held, is_last=number == len(pieces))
            text += held[:length]
            held = held[length + len(mark) :]
            if not mark:
                break
            found.append((text, mark))
            text = ""
    assert not held
    return [*found, (text, "")]


@given(MARKS, st.lists(TEXTS, max_size=8))
def test_marks_are_found_for_any_split(texts: list[str], pieces: list[str]):
    marks = Marks(*texts)
    assert split(marks, pieces) == split(marks, ["".join(pieces)])


@given(MARKS, TEXTS)
def test_split_keeps_all_text_and_finds_all_marks(texts: list[str], text: str):
    found = split(Marks(*texts), [text])
    assert "".join(before + mark for before, mark in found) == text
    assert not [mark for mark in texts for before, _ in found if mark in before]


@given(MARKS, TEXTS)
def test_text_is_held_back_only_if_it_may_become_mark(texts: list[str], text: str):
    length, mark = Marks(*texts).find(text)
    held = text[length:]
    assert mark or not held or any(one.startswith(held) and one != held for one in texts)


def test_longer_of_two_possible_marks_is_awaited():
    marks = Marks("<a>", "<a>b")
    assert marks.find("x<a>") == (1, "")
    assert marks.find("x<a>", is_last=True) == (1, "<a>")
    assert marks.find("x<a>c") == (1, "<a>")
    assert marks.find("x<a>b") == (1, "<a>b")


def test_regex_characters_in_marks_are_literal():
    assert Marks("]<]m[>[<t>").find("a]<]m[>[<t>") == (1, "]<]m[>[<t>")
    assert Marks("[T|]").find("a[T") == (1, "")
    assert Marks().find("a<") == (2, "")
