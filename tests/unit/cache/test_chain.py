"""Pieces of prompts that follow each other: found by digests, compared element by element."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.cache.prompts import Piece as Word
from tests.unit.cache.prompts import elements_of, is_boundary, num_common, parts_of
from vlm_server.cache.chain import Chain, Pieces, Walk, piece_behind
from vlm_server.cache.elements import Elements

SPANS: list[Word] = [("red", 2, 9), ("red", 3, 9), ("blue", 2, 9)]
words = st.lists(st.one_of(st.integers(0, 2), st.sampled_from(SPANS)), min_size=1, max_size=8)
salts = st.sampled_from(["", "mine"])


def everything(key: str) -> bool:
    return True


def keep(pieces: Pieces, elements: Elements, salt: str = "", end: int | None = None) -> Walk:
    """Add what is missing of `elements`, as a tier would; returns what was there."""
    walk = pieces.walk(elements, len(elements), salt, everything)
    end = len(elements) if end is None else end
    if walk.length < end:
        pieces.add(piece_behind(walk.chain, elements.part(walk.length, end)))
    return walk


@given(words, salts, st.data())
def test_the_digest_does_not_depend_on_the_parts(
    prompt: list[Word], salt: str, data: st.DataObject
) -> None:
    elements = elements_of(prompt)
    parts = parts_of(elements)
    cut = data.draw(st.sampled_from([n for n in range(len(parts)) if is_boundary(parts, n)]))
    whole, cut_up = Chain(salt), Chain(salt)
    whole.add(elements)
    cut_up.add(elements.part(0, cut))
    cut_up.add(elements.part(cut, len(elements)))
    assert whole.digest == cut_up.digest


@given(words, salts, words, salts)
def test_other_elements_and_salts_have_other_digests(
    one: list[Word], salt: str, other: list[Word], other_salt: str
) -> None:
    chains = Chain(salt), Chain(other_salt)
    for chain, prompt in zip(chains, (one, other), strict=True):
        chain.add(elements_of(prompt))
    assert (chains[0].digest == chains[1].digest) == ((one, salt) == (other, other_salt))


@given(st.lists(st.tuples(words, salts), max_size=6), words, salts, st.integers(0, 20))
def test_a_walk_reaches_as_far_as_any_prompt_that_was_kept(
    kept: list[tuple[list[Word], str]], prompt: list[Word], salt: str, limit: int
) -> None:
    pieces = Pieces(whole=False)
    for words_, salt_ in kept:
        keep(pieces, elements_of(words_), salt_)
    elements = elements_of(prompt)
    walk = pieces.walk(elements, limit, salt, everything)
    limit = min(limit, len(elements))
    alike = [parts_of(elements_of(words_)) for words_, salt_ in kept if salt_ == salt]
    assert walk.length == max(
        [0, *(num_common(parts, parts_of(elements), limit) for parts in alike)]
    )
    assert walk.length == sum(count for _, count in walk.pieces)
    found = tuple(p for piece, n in walk.pieces for p in parts_of(piece.elements.part(0, n)))
    assert found == parts_of(elements)[: walk.length]


def test_whole_pieces_are_used_as_a_whole_or_not() -> None:
    pieces = Pieces(whole=True)
    keep(pieces, elements_of([1, 2, 3]), end=2)
    keep(pieces, elements_of([1, 2, 3]))
    lengths = [
        pieces.walk(elements_of(prompt), limit, "", everything).length
        for prompt, limit in [([1, 2, 3, 4], 9), ([1, 2, 3], 2), ([1, 2, 4], 9), ([1, 4], 9)]
    ]
    assert lengths == [3, 2, 2, 0]


def test_what_is_not_usable_or_dropped_ends_the_walk() -> None:
    pieces, elements = Pieces(whole=False), elements_of([1, 2, 3])
    keep(pieces, elements, end=1)
    keep(pieces, elements, end=2)
    walk = keep(pieces, elements)
    first, second = walk.keys
    assert pieces.walk(elements, 9, "", lambda key: key != second).length == 1
    pieces.drop([first, "unknown"])
    assert pieces.walk(elements, 9, "", everything).length == 0
    assert len(pieces) == 2
    pieces.drop(walk.keys)
    assert len(pieces) == 1
