"""The compilation of constraints with llguidance.

Some schemas of 10 kB take minutes and 20 GB, or overflow the stack, and a compilation can't be
stopped. So it runs in a process that may die or be killed: `grammar_process`.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from vlm_server.prompt.grammar import lark
from vlm_server.prompt.grammar.bounded_numbers import BoundedMatcher
from vlm_server.prompt.grammar.constraints import AutoCalls, Constraint, RequiredCalls, Schema
from vlm_server.prompt.grammar.forked_process import SchemaError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_MAX_REASON_CHARS = 200
_MAX_EXACT, _EXACT_DIGITS = 1 << 53, 17
_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": False,  # a model that may write blanks can do so for ever
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": None,
    "json_allow_general_unicode_escapes": False,
}
"""All options, since a schema could set omitted ones. Separators are those of `json.dumps`."""
_LIMITS = LLParserLimits(max_lexer_states=20_000, verbose_errors=False)
"""Each lexer state takes 1 to 2 kB, per answer."""


def compile_constraint(tokenizer: LLTokenizer, constraint: Constraint) -> BoundedMatcher:
    """A matcher at the beginning of an answer. Raises SchemaError."""
    bounds = lark.bounded_json(constraint.header)
    match constraint:
        case Schema(schema):
            matcher = _compile_schema(tokenizer, schema)
            if constraint.header:
                matcher = _compile_lark(tokenizer, lark.answer(constraint, dict(_OPTIONS)))
        case RequiredCalls():
            _check_each(tokenizer, constraint)
            matcher = _compile_lark(tokenizer, lark.required_calls(constraint, dict(_OPTIONS)))
        case AutoCalls():
            _check_each(tokenizer, constraint)
            matcher = _compile_lark(tokenizer, lark.auto_calls(constraint, dict(_OPTIONS)))
            bounds = lark.bounded_auto_calls(constraint)
    return BoundedMatcher(tokenizer, matcher, _compile_lark(tokenizer, bounds))


def _compile_lark(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    return _matcher(tokenizer, LLMatcher.grammar_from_lark(grammar))


def _compile_schema(tokenizer: LLTokenizer, schema: str) -> LLMatcher:
    _check_integers(schema)
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
    except ValueError as error:
        raise SchemaError(_one_line(str(error))) from None
    return _matcher(tokenizer, grammar)


def _matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=_LIMITS)
    matcher.compute_bitmask()  # some schemas fail only here
    if matcher.is_error():
        raise SchemaError(_one_line(matcher.get_error()))
    return matcher


def _check_each(tokenizer: LLTokenizer, constraint: RequiredCalls | AutoCalls) -> None:
    """Compile each schema alone. Raises SchemaError, naming the tool at fault.

    In a grammar of several tools, a schema that is too complex would fail only when an answer
    begins a call of its tool.
    """
    for name, parameters in lark.callable_tools(constraint.tools):
        if isinstance(constraint, RequiredCalls) or name in constraint.tools.strict:
            try:
                _compile_schema(tokenizer, json.dumps(lark.arguments_schema(parameters)))
            except SchemaError as error:
                raise SchemaError(f"`{name}`: {error}") from None
    if isinstance(constraint, AutoCalls) and constraint.schema is not None:
        _compile_schema(tokenizer, constraint.schema)


def _check_integers(schema: str) -> None:
    """Raises SchemaError for integers that llguidance, which reads doubles, would change."""

    def parse(digits: str) -> int:
        if len(digits) > _EXACT_DIGITS or abs(int(digits)) > _MAX_EXACT:
            raise SchemaError("it has an integer of more than 53 bits")
        return int(digits)

    with contextlib.suppress(ValueError, RecursionError):  # no JSON: llguidance says why
        json.loads(schema, parse_int=parse)


def _one_line(message: str) -> str:
    if message.startswith("panic") or "<non-verbose/>" in message:
        return "it is too complex"
    return re.sub(r"\s+", " ", message)[:_MAX_REASON_CHARS]
