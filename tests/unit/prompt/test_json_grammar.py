"""Schemas are tried in a process of their own, which may fail in every way."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from vlm_server.prompt.grammar.schema import SchemaError, try_schema

HUGE = {"allOf": [{"type": "string", "pattern": f"a{{{i}}}b"} for i in range(1, 200)]}
"""Would take minutes and 20 GB."""


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"title": "T", "description": "é", "type": "string", "default": "x", "examples": [1]},
        {"type": ["string", "null"], "maxLength": 10**9},
        {"$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"},
        {"properties": {"a": {"type": "integer", "minimum": -5}}, "required": ["a"]},
        {"enum": [2**53, -(2**53)]},
    ],
)
def test_what_can_be_obeyed_is_taken(schema: Any) -> None:
    try_schema(json.dumps(schema), 60.0)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "text"}, "Invalid type"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
        ({"enum": []}, "empty"),
        ({"enum": [1, {"a": [2**53 + 1]}]}, "more than 53 bits"),
        ({"const": -(10**400)}, "more than 53 bits"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "incompatible"),
        ({"not": {}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"$ref": "http://127.0.0.1/schema.json"}, "retriev"),
        ({"$ref": "file:///etc/passwd"}, "retriev"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"$ref": "#"}, "complex"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(schema: Any, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason) as caught:
        try_schema(json.dumps(schema), 60.0)
    assert len(str(caught.value)) <= 200
    assert str(caught.value).isprintable()


def test_one_that_takes_for_ever_is_given_up() -> None:
    started = time.monotonic()
    with pytest.raises(SchemaError, match="more than 1 seconds"):
        try_schema(json.dumps(HUGE), 1.0)
    assert time.monotonic() - started < 30


def test_one_that_is_too_deep_fails_there_and_not_here() -> None:
    depth = 100_000
    with pytest.raises(SchemaError):
        try_schema('{"items":' * depth + "{}" + "}" * depth, 60.0)
