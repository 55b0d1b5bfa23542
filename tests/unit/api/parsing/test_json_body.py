"""JSON bodies: limits before decoding, equality with the standard library, error messages."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.processor_time import processor_time
from tests.support.whole_run import examples
from vlm_server.api.parsing import json_body
from vlm_server.errors import InvalidRequest, RequestError

MEBIBYTE = 1 << 20
VALUES = json_body.MAX_VALUES


def lists(num: int) -> bytes:
    """An object with a list of `num` lists: `num` + 2 values."""
    return b'{"x":[' + b",".join([b"[]"] * num) + b"]}"


def nested(depth: int) -> bytes:
    return b'{"x":' * (depth - 1) + b"{}" + b"}" * (depth - 1)


@pytest.mark.parametrize(
    "body",
    [
        lists(json_body.MAX_VALUES // 2 - 10),
        nested(json_body.MAX_DEPTH),
        b'{"x":"' + b"[{," * VALUES + b'"}',
        b'{"x":"' + b'\\"[' * VALUES + b'"}',
        b'{"x":"' + b"\\\\" * VALUES + b'"}',
        json.dumps({"n" * json_body.MAX_NAME_CHARS: 1}).encode(),
    ],
    ids=["values", "depth", "brackets in a text", "quotes", "backslashes", "name"],
)
def test_bodies_at_limits_are_parsed(body: bytes) -> None:
    assert json_body.parse_object(body) == json.loads(body)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (lists(VALUES), "values"),
        (b'{"x":[' + b"1," * VALUES + b"1]}", "values"),
        (b"{" + b",".join(b'"%d":1' % n for n in range(VALUES + 2)) + b"}", "values"),
        (b'{"x":["' + b'","' * (2 * VALUES) + b'"]}', "values"),
        (nested(json_body.MAX_DEPTH + 1), "deeply"),
        (b'{"x":' + b"[" * 10_000, "deeply"),
        (json.dumps({"n" * (json_body.MAX_NAME_CHARS + 1): 1}).encode(), "name"),
    ],
)
def test_bodies_over_limits_are_refused_with_reason(body: bytes, word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        json_body.parse_object(body)


@pytest.mark.parametrize(
    "make",
    [
        lambda: lists(4 * MEBIBYTE),
        lambda: b'{"x":' * (2 * MEBIBYTE),
        lambda: b'{"x":[' + b"[" * 600 + b',"' + b'\\"' * (6 * MEBIBYTE),
        lambda: b'{"x":[' + b"[" * 600 + b',"' + b"\\" * (12 * MEBIBYTE),
        lambda: b'{"x":[1' + b"," * (12 * MEBIBYTE),
        lambda: b'{"x":1' + b"1" * (12 * MEBIBYTE) + b"}",
    ],
    ids=["lists", "depth", "quotes without an end", "backslashes", "commas", "digits"],
)
def test_oversized_json_is_refused_quickly(make: Callable[[], bytes]) -> None:
    body = make()
    with processor_time() as measured, pytest.raises(InvalidRequest):
        json_body.parse_object(body)
    assert measured.seconds < 3  # a tenth of a second on an idle machine


def test_small_bodies_have_few_bytes_and_values() -> None:
    assert json_body.is_small(b'{"x":"' + b"s" * 200_000 + b'"}')
    assert not json_body.is_small(b'{"x":"' + b"s" * json_body.SMALL_BYTES + b'"}')
    assert not json_body.is_small(lists(json_body.SMALL_VALUES))


VALUE = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=20,
)


def outcome_of(body: bytes) -> dict[str, Any] | RequestError:
    try:
        return json_body.parse_object(body)
    except RequestError as error:
        refusal = error
    assert refusal.status == 400
    assert len(refusal.message) < 200
    return refusal


@settings(derandomize=True)
@given(VALUE)
def test_arbitrary_json_is_parsed_equally_or_refused_briefly(value: Any) -> None:
    outcome = outcome_of(json.dumps(value).encode())
    assert isinstance(outcome, RequestError) or outcome == value


@settings(derandomize=True)
@given(st.binary(max_size=100))
@example(b"\xff")
@example(b'{"a":1}\0')
@example(b'{"a":"\\ud800"}')
@example(b"")
def test_arbitrary_bytes_are_object_or_refused(body: bytes) -> None:
    assert isinstance(outcome_of(body), RequestError | dict)


STRINGS = st.sampled_from(
    ['"a"', r'"\u0061"', r'"\""', r'"\u0022"', r'"\\u0022"', r'"\\"', '""', '"é"']
)
SCALARS = st.sampled_from(
    ["1", "-0", "1e5", "1e999", "1" * 40, "NaN", "null", r'"\ud800"', "01", "x"]
)


def objects(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    pairs = st.lists(st.tuples(STRINGS, inner), max_size=3)
    return pairs.map(
        lambda items: "{" + ",".join(f"{name}: {value}" for name, value in items) + "}"
    )


def arrays(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(inner, max_size=3).map(lambda items: "[" + ",".join(items) + "]")


JSON = st.recursive(STRINGS | SCALARS, lambda inner: objects(inner) | arrays(inner), max_leaves=8)


@settings(derandomize=True, max_examples=examples(500))
@given(objects(JSON))
@example(r'{"a": "\u0022\u0022", "b": 1, "b": 1}')
@example(r'{"a": {"b": "x", "b": "y"}, "c": "\""}')
def test_body_is_parsed_like_standard_library(text: str) -> None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    outcome = outcome_of(text.encode())
    try:
        expected = json.loads(text, object_pairs_hook=unique)
    except (ValueError, AssertionError):
        assert isinstance(outcome, RequestError)
    else:
        assert isinstance(outcome, RequestError) == ("NaN" in text)
        assert isinstance(outcome, RequestError) or outcome == expected


@pytest.mark.parametrize(
    ("rest", "word"),
    [
        ('"b": }', "line 1, column 27962"),
        ('"b": 1, "b": 2}', "duplicate name in an object: `b`"),
        ('"b": "\n"}', "line 1, column 27962"),
        ('"b": NaN}', "NaN"),
        ('"b": ' + "1" * 5000 + "}", "digits"),
    ],
)
def test_json_error_after_image_has_its_position(rest: str, word: str) -> None:
    url = base64.b64encode(os.urandom(2 * MEBIBYTE)).decode()
    with pytest.raises(RequestError, match=word):
        json_body.parse_object(f'{{"a": "{url}", {rest}'.encode())


@pytest.mark.parametrize("unit", [b'\\"', b'"",', b'"\\\\",', b"\\" * 70 + b'"'])
def test_hostile_quotes_are_parsed_quickly(unit: bytes) -> None:
    body = b'{"a": ["' + unit * ((4 << 20) // len(unit))
    with processor_time() as measured, pytest.raises(InvalidRequest):
        json_body.parse_object(body)
    assert measured.seconds < 1
