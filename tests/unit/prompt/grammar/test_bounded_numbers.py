"""Numbers in JSON answers end, whatever a model repeats; a schema's own bounds win."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tests.unit.prompt.grammar.test_call_grammars import (
    END,
    HERMES,
    compiled,
    constraint,
    takes,
    tools,
)
from tests.unit.prompt.grammar.test_grammars import byte_host, grammars
from vlm_server.interfaces import Grammar
from vlm_server.prompt.grammar import lark
from vlm_server.prompt.grammar.bounded_numbers import BoundedMatcher
from vlm_server.prompt.grammar.constraints import Schema
from vlm_server.prompt.grammar.grammar_cache import Grammars

__all__ = ["grammars"]

LONGEST, MANY_DIGITS = 2**63 - 1, "1" * 40
NUMBER: dict[str, Any] = {"type": "number"}
INTEGER: dict[str, Any] = {"type": "integer"}
RECORD = {
    "type": "object",
    "$defs": {"share": {"anyOf": [{"type": "null"}, {"type": "number", "exclusiveMinimum": 0}]}},
    "properties": {
        "id": {"type": "integer"},
        "share": {"$ref": "#/$defs/share"},
        "price": {"type": "number", "multipleOf": 0.01},
        "rest": {"type": "array", "items": {"type": ["string", "number"]}, "maxItems": 2},
        "size": {"type": "number", "exclusiveMinimum": -5, "exclusiveMaximum": 5},
        "kind": {"enum": [1, 2.5, "x"]},
    },
    "required": ["id", "share", "price", "rest", "size", "kind"],
    "additionalProperties": False,
}


def held_to(grammars: Grammars, schema: Any) -> Grammar:
    return compiled(grammars, Schema(json.dumps(schema)))


def answer_of_digits(grammar: Grammar, digit: str) -> str:
    """What a model answers that writes `digit` wherever it may, and else what leads on to more."""
    (matcher,) = grammar.begin(1)
    wishes = [*digit.encode(), *b'-.1[{":,]}']
    ids = [byte_host().backend.encode(chr(byte)).ids[0] for byte in wishes]
    sampled: list[int] = []
    while not sampled or sampled[-1] != END:
        assert len(sampled) < 500, "it does not end"
        assert matcher.wait(30)
        allowed = matcher.allowed()
        choice = next((i for i in ids if allowed[i]), None)
        sampled.append(END if allowed[END] and choice is None else choice or int(allowed.argmax()))
        matcher.advance([sampled[-1]])
    matcher.close()
    return str(byte_host().backend.decode(sampled[:-1]))


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        (
            INTEGER,
            ["0", "-7", str(LONGEST), str(-LONGEST), "999999999999999999"],
            [str(LONGEST + 1), MANY_DIGITS],
        ),
        (
            NUMBER,
            ["0.30000000000000004", "-0.0000012345678901234567", "12345.678901234567", "6.02e+23"],
            ["0." + MANY_DIGITS, "1." + "0" * 17, "1e100", "1E-100", MANY_DIGITS, "1e1111"],
        ),
        ({}, ['{"a": [1, -2.5e-3, "x"]}', f'"{MANY_DIGITS}"'], [f'{{"a": {MANY_DIGITS}}}']),
        ({"type": "object"}, ['{"1": 1}'], ['{"a": 0.' + MANY_DIGITS + "}"]),
    ],
)
def test_numbers_are_those_of_64_bits_and_17_digits(
    grammars: Grammars, schema: Any, texts: list[str], others: list[str]
):
    grammar = held_to(grammars, schema)
    for text in texts:
        assert takes(grammar, text), text
    for text in others:
        assert not takes(grammar, text), text


@pytest.mark.parametrize("number", [0.1 + 0.2, 1 / 3, 1e-6 / 7, 123456.78901234567, 5e-99, 2.0**63])
def test_shortest_form_of_double_may_be_written(grammars: Grammars, number: float):
    assert takes(held_to(grammars, NUMBER), json.dumps(number))


@pytest.mark.parametrize("digit", "0179")
@pytest.mark.parametrize(
    "schema",
    [
        INTEGER,
        NUMBER,
        RECORD,
        {"type": "number", "multipleOf": 0.001},
        {"type": "number", "minimum": 0.5},
        {"type": "integer", "exclusiveMaximum": -3},
        {"anyOf": [{"type": "number"}, {"type": "object", "additionalProperties": INTEGER}]},
        {"allOf": [NUMBER, {"maximum": 10**6}]},
    ],
)
def test_answer_of_one_repeated_digit_ends_and_conforms(
    grammars: Grammars, schema: Any, digit: str
):
    answer = json.loads(answer_of_digits(held_to(grammars, schema), digit))
    jsonschema.validate(answer, schema)


@pytest.mark.parametrize("digit", "19")
def test_calls_of_one_repeated_digit_end_and_conform(grammars: Grammars, digit: str):
    offered = tools(parallel=False, record=RECORD)
    (call,) = json.loads(answer_of_digits(compiled(grammars, constraint(offered)), digit))
    jsonschema.validate(call["arguments"], RECORD)


def test_numbers_are_bounded_in_auto_calls_and_not_around_them(grammars: Grammars):
    offered = tools("auto", strict=("add",), add={"properties": {"n": NUMBER}}, any=None)
    grammar = compiled(grammars, constraint(offered))
    call = '<tool_call>\n{"name": "add", "arguments": {"n": %s}}\n</tool_call>'
    assert takes(grammar, f"{MANY_DIGITS}: {call % 12.5} {call % '-3'}{MANY_DIGITS}")
    assert not takes(grammar, call % MANY_DIGITS)
    with_schema = compiled(grammars, constraint(tools("auto", add=None), HERMES, NUMBER))
    assert takes(with_schema, "12.5")
    assert not takes(with_schema, MANY_DIGITS)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "number", "maximum": 1e-9, "minimum": 0}, "0.00000000011"),
        ({"type": "array", "items": {"enum": [1e22, 2]}}, "[1" + "0" * 22 + ", 2]"),
        ({"type": "integer", "minimum": 10**15, "maximum": 10**15 + 5}, "1000000000000003"),
    ],
)
def test_bounds_of_schema_win(grammars: Grammars, schema: Any, text: str):
    jsonschema.validate(json.loads(text), schema)
    assert takes(held_to(grammars, schema), text)


TOKENIZER = LLTokenizer(byte_host().backend.to_str(), n_vocab=257, eos_token=256)
LONG = 'start: "[" /[0-9]{22,}5/ (", " /[0-9]+/)* "]"'
"""Needs numbers out of bounds."""


def matcher_of(grammar: str) -> BoundedMatcher:
    matchers = [LLMatcher(TOKENIZER, text, log_level=0) for text in (grammar, lark.bounded_json())]
    return BoundedMatcher(TOKENIZER, *matchers)


def allowed(matcher: BoundedMatcher) -> str:
    """The characters that may come next, in order."""
    bits = int.from_bytes(matcher.mask(), "little")
    return "".join(sorted(TOKENIZER.decode_str([i]) for i in range(256) if bits >> i & 1))


def test_number_beyond_bounds_ends_as_soon_as_it_may_and_later_ones_are_bounded():
    matcher = matcher_of(LLMatcher.grammar_from_lark(LONG))
    shown = {}
    for position, token_id in enumerate(TOKENIZER.tokenize_str("[" + "1" * 25 + "5, " + "2" * 19)):
        shown[position] = allowed(matcher)
        matcher.append(token_id)
    assert shown[19] == "0123456789"
    assert shown[20] == shown[25] == "123456789"
    assert shown[27] == ",]"
    assert shown[29] == "0123456789"
    assert allowed(matcher) == ",]"


@settings(max_examples=60, deadline=None)
@given(digits=st.integers(15, 30), drafts=st.text("125,] ", max_size=8))
def test_drafts_leave_masks_as_they_were(digits: int, drafts: str):
    grammar = LLMatcher.grammar_from_lark(LONG)
    plain, drafting = matcher_of(grammar), matcher_of(grammar)
    for token_id in TOKENIZER.tokenize_str("[" + "1" * digits + "5, 12"):
        ahead = drafting.deep_copy()
        for draft in TOKENIZER.tokenize_str(drafts):
            before = ahead.mask()
            if ahead.try_append(draft):
                assert before[draft // 8] >> draft % 8 & 1
        assert drafting.mask() == plain.mask()
        plain.append(token_id)
        drafting.append(token_id)
