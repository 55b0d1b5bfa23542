"""Base64 is kept out of the parser, and nobody can tell."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.processor_time import processor_time
from tests.whole import examples
from vlm_server.api.parsing import json_body, long_strings
from vlm_server.errors import RequestError

LONG = base64.b64encode(bytes(range(256)) * 1024).decode()
URL = "data:image/png;base64," + LONG

texts = st.sampled_from([LONG, URL, LONG[:-1], URL + " ", '"' * 9, "\\" * 9, '\\"', "é", "", "x,"])
values: st.SearchStrategy[Any] = st.recursive(
    texts | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def parsed(body: bytes) -> Any:
    """What comes of a body, or the error that does."""
    try:
        return json_body.parse_object(body)
    except RequestError as error:
        return str(error)


@settings(max_examples=examples(60), deadline=None)
@given(values, st.booleans())
def test_the_result_is_that_of_parsing_all_of_it(value: Any, is_ascii: bool) -> None:
    body = json.dumps({"a": value, "b": LONG}, ensure_ascii=is_ascii).encode()
    whole = body.replace(LONG.encode(), b"L" * 1025)  # as long a name as is refused, and not cut
    assert parsed(body) == _replaced(parsed(whole))


def _replaced(value: Any) -> Any:
    return json.loads(json.dumps(value).replace("L" * 1025, LONG))


@pytest.mark.parametrize(
    ("string", "is_cut"),
    [
        (LONG, True),
        (URL, True),
        ("data:image/png;base64,\\n" + LONG, False),
        (LONG[:-3], False),
        (LONG[:1000], False),
        (LONG.replace("A", "é"), False),
        (LONG.replace("/", "\\/"), False),
        (LONG + "\n", False),
        ("x" * 300 + "," + LONG, False),
        ("b\x01," + LONG, False),
    ],
)
def test_what_is_cut_out(string: str, is_cut: bool) -> None:
    body = f'{{"a \\\\\\"": ["{string}"], "b": 1}}'.encode()
    found = long_strings.cut(body)
    assert (found is not None) == is_cut
    if found is not None:
        assert found.strings == [string]
        assert len(found.json) < 100


@pytest.mark.parametrize(
    "ending", ['"', '"]', '", "b": }', '", "b": 1, "b": 2}', '", "b": "\n"}', '", "b": "\ud800"}']
)
def test_errors_are_those_of_the_whole_body(ending: str) -> None:
    body = ('{"a": "' + LONG + ending).encode(errors="surrogatepass")
    with pytest.raises(RequestError) as found:
        json_body.parse_object(body)
    if "line" in str(found.value):
        assert f"column {len(LONG)}"[:-2] in str(found.value)


def test_a_name_is_never_cut_out() -> None:
    body = f'{{"{LONG}": "{URL}"}}'.encode()
    assert long_strings.cut(body) is not None
    with pytest.raises(RequestError, match="more than 1024 characters"):
        json_body.parse_object(body)


STRING_OF_QUOTES = b'"' + b'\\"' * 9_000 + b'",'


@pytest.mark.parametrize("unit", [b'\\"', b'"",', b'"\\\\",', b"\\" * 70 + b'"', STRING_OF_QUOTES])
def test_hostile_quotes_take_no_time(unit: bytes) -> None:
    body = b'{"a": ["' + unit * ((8 << 20) // len(unit))
    with processor_time() as measured:
        assert long_strings.cut(body) is None
    assert measured.seconds < 0.5
