"""Common prefixes of prompts, against a comparison position by position."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.whole_run import examples
from tests.unit.cache.prompts import (
    Item,
    is_boundary,
    num_common,
    parts_of,
    prompt_of,
)
from vlm_server.cache.prompt_key import NOTHING, MediaSpan

CAT, DOG = ("cat", 3, 9), ("dog", 3, 9)
LONG_CAT = ("cat", 4, 9)
CAT_OF_OTHER_IDS = ("cat", 3, 8)
ITEMS = st.integers(0, 2) | st.tuples(
    st.sampled_from(["a", "b"]), st.integers(1, 3), st.integers(0, 2)
)
PROMPTS = st.lists(ITEMS, max_size=6)


@pytest.mark.parametrize(
    ("own", "others", "common"),
    [
        ([], [], 0),
        ([1], [], 0),
        ([], [1], 0),
        ([1, 2, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2, 4], 2),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([1, CAT, 2], [1, CAT, 2], 5),
        ([1, CAT, 2], [1, CAT, 3], 4),
        ([1, CAT, 2], [1, DOG, 2], 1),
        ([1, CAT, 2], [1, LONG_CAT], 1),
        ([1, LONG_CAT], [1, CAT, 9], 1),
        ([1, CAT], [1, 9, 9, 9], 1),
        ([1, 9, 9, 9], [1, CAT], 1),
        ([1, CAT, 2], [1, CAT_OF_OTHER_IDS, 2], 5),
        ([CAT, CAT], [CAT, DOG], 3),
        ([CAT, DOG], [DOG, CAT], 0),
        ([9, CAT], [CAT, 9], 0),
        ([9, 9, CAT], [9, CAT, 9], 1),
    ],
)
def test_num_common_counts_common_prefix(own: list[Item], others: list[Item], common: int) -> None:
    assert prompt_of(own).num_common(0, prompt_of(others)) == common


def test_spans_are_compared_relative_to_start() -> None:
    own = prompt_of([1, CAT, 2, DOG, 3])
    assert own.num_common(4, prompt_of([2, DOG, 3, 4])) == 5
    assert own.num_common(4, prompt_of([2, CAT, 3])) == 1
    assert own.num_common(1, prompt_of([CAT, 2, DOG, 3])) == 8


def test_part_has_spans_relative_to_its_start() -> None:
    part = prompt_of([1, CAT, 2, DOG, 3]).part(4, 8)
    assert part.token_ids.tolist() == [2, 9, 9, 9]
    assert part.spans == (MediaSpan(1, 4, "dog"),)
    assert (part.first, part.key_at(1)) == (2, "dog")


def test_span_key_never_equals_token_id() -> None:
    assert prompt_of([("1", 1, 1)]).first == "1"
    assert prompt_of([1]).first == 1


@pytest.mark.parametrize(
    ("end", "floor"), [(0, 0), (1, 1), (2, 1), (3, 1), (4, 4), (5, 4), (6, 4), (7, 7), (8, 8)]
)
def test_floor_is_never_inside_span(end: int, floor: int) -> None:
    assert prompt_of([1, CAT, DOG, 2]).floor(end) == floor


def test_empty_prompt_key_has_no_common_prefix() -> None:
    assert len(NOTHING) == 0
    assert NOTHING.num_common(0, prompt_of([1])) == 0
    assert NOTHING.token_ids.dtype == np.int32


@settings(max_examples=examples(400), deadline=None)
@given(shared=PROMPTS, own=PROMPTS, others=PROMPTS, data=st.data())
def test_num_common_equals_comparison_position_by_position(
    shared: list[Item], own: list[Item], others: list[Item], data: st.DataObject
) -> None:
    prompt_key, other = prompt_of(shared + own), prompt_of(shared + others)
    parts = parts_of(prompt_key)
    start = data.draw(st.sampled_from([n for n in range(len(parts) + 1) if is_boundary(parts, n)]))
    for edge in (other, other.part(min(start, other.floor(start)), len(other))):
        common = prompt_key.num_common(start, edge)
        assert common == num_common(parts[start:], parts_of(edge), len(parts))


@settings(max_examples=examples(200), deadline=None)
@given(prompt=PROMPTS)
def test_parts_and_floors_equal_those_position_by_position(prompt: list[Item]) -> None:
    prompt_key = prompt_of(prompt)
    parts = parts_of(prompt_key)
    positions = range(len(parts) + 1)
    boundaries = [n for n in positions if is_boundary(parts, n)]
    assert [prompt_key.floor(n) for n in positions] == [
        max(b for b in boundaries if b <= n) for n in positions
    ]
    for start in boundaries:
        for end in (n for n in boundaries if n >= start):
            assert parts_of(prompt_key.part(start, end)) == parts[start:end]
