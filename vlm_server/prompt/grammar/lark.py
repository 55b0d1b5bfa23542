"""Grammars of tool calls in llguidance's dialect of Lark.

Each tool's schema is a JSON grammar of its own, so that its references point into itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from vlm_server.prompt.grammar.bounded_numbers import BOUNDED_JSON
from vlm_server.prompt.grammar.constraints import (
    AutoCalls,
    CallSyntax,
    Mark,
    RequiredCalls,
    Schema,
)
from vlm_server.prompt.grammar.forked_process import SchemaError
from vlm_server.protocol import Tools

MAX_CALLS = 16
"""The most calls in one answer."""

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
_OPEN_ENDED = frozenset({
    "additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames",
    "minProperties", "dependentSchemas", "allOf", "anyOf", "oneOf", "not", "if", "$ref",
    "$dynamicRef",
})  # fmt: skip
"""Keywords that may allow arguments beyond a schema's `properties`."""
_BLANK = r"/[ \n]{0,2}/"
_BOUNDED = f"JSON: {BOUNDED_JSON}"


def arguments_schema(parameters: Any) -> dict[str, Any]:
    """The schema of a tool's arguments: an object without unnamed properties. Raises SchemaError.

    A schema with a keyword about additional arguments stays as it is.
    """
    if parameters is None or parameters == {}:
        parameters = _NO_ARGUMENTS
    if not isinstance(parameters, dict):
        raise SchemaError("its parameters are not the schema of an object")
    types = parameters.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise SchemaError("its parameters are not of the type `object`")
    properties, required = parameters.get("properties"), parameters.get("required")
    schema = parameters | {"type": "object"}
    if isinstance(properties, dict) and _OPEN_ENDED.isdisjoint(parameters):
        is_complete = not isinstance(required, list) or all(name in properties for name in required)
        schema |= {"additionalProperties": False} if is_complete else {}
    return schema


def callable_tools(tools: Tools) -> Iterator[tuple[str, Any]]:
    """The name and the parameters of each tool that may be called."""
    for tool in json.loads(tools.definitions):
        function = tool["function"]
        if not tools.allowed or function["name"] in tools.allowed:
            yield function["name"], function.get("parameters")


def answer(constraint: Schema, options: dict[str, Any]) -> str:
    """The grammar of the JSON of a schema, after its header. options: those of the JSON grammar."""
    schema = _json(json.loads(constraint.schema), options)
    return f"start: {_spell(constraint.header)} answer\nanswer: {schema}"


def required_calls(constraint: RequiredCalls, options: dict[str, Any]) -> str:
    """The grammar of an answer of calls only. options: those of its JSON grammars."""
    more_calls = f' (", " object){{0,{MAX_CALLS - 1}}}' if constraint.tools.parallel else ""
    start = f'start: {_spell(constraint.header)} "[" object{more_calls} "]"'
    return "\n".join([start, *_objects(constraint.tools, None, options)])


def auto_calls(constraint: AutoCalls, options: dict[str, Any]) -> str:
    """The grammar of text with calls in the model's own syntax; or of a schema's JSON, or calls."""
    answer = "" if constraint.schema is None else _json(json.loads(constraint.schema), options)
    objects = _objects(constraint.tools, frozenset(constraint.tools.strict), options)
    return "\n".join(_auto_calls(constraint, _spell(constraint.header), answer, objects))


def bounded_json(header: Mark = ()) -> str:
    """The grammar of text that is JSON with bounded numbers: see `BOUNDED_JSON`.

    A header need not come first: after a number out of bounds, the text is read anew.
    """
    return f"start: {_optional(header)} JSON\n{_BOUNDED}"


def bounded_auto_calls(constraint: AutoCalls) -> str:
    """The grammar of `auto_calls` in whose JSON only numbers are bounded."""
    header = _optional(constraint.header)
    return "\n".join([*_auto_calls(constraint, header, "JSON", ["object: JSON"]), _BOUNDED])


def _auto_calls(constraint: AutoCalls, header: str, answer: str, objects: list[str]) -> list[str]:
    """Rules of text with calls, or of the answer or calls. objects: the rules of `object`.

    header, answer: what the text of an answer begins with, and its rest.
    """
    syntax, tools = constraint.syntax, constraint.tools
    if constraint.schema is None:
        rules = [f"start: called{'*' if tools.parallel else '?'} TEXT", *_text_before(syntax)]
    else:
        more_calls = rf" (/\n?/ called){{0,{MAX_CALLS - 1}}}" if tools.parallel else ""
        rules = [f"start: answer | called{more_calls}", f"answer: {header} json", f"json: {answer}"]
        rules += [f"head: {_spell(syntax.start)}"]
    rules += [r"ANY: /(.|\n)*/"]
    if not syntax.is_json:
        return [*rules, "called: head body", *_any_body(syntax.end)]
    rules += [f"called: head {_BLANK} object {_BLANK} {_spell(syntax.end)}"]
    return [*rules, *objects]


def _text_before(syntax: CallSyntax) -> list[str]:
    """Rules of `head`, free text and the mark after it, and `TEXT`, free text without the mark."""
    text = f"TEXT: ANY & ~(ANY {json.dumps(syntax.start_text, ensure_ascii=False)} ANY)"
    mark = _spell(syntax.start)
    if isinstance(syntax.start[0], int):
        return [f"head: TEXT {mark}", text]
    return [f"head[lazy]: ANY {mark}", text]


def _any_body(end: Mark) -> list[str]:
    """The rule of `body`: any text of a call, up to the mark after it."""
    if not end:
        return ["body: (<[*]>)*"]
    if isinstance(end[0], int):
        return [f"body: (<[^{end[0]}]>)* {_spell(end)}"]
    return [f"body[lazy]: ANY {_spell(end)}"]


def _objects(tools: Tools, strict: frozenset[str] | None, options: dict[str, Any]) -> list[str]:
    """The rules of `object`: a call of one of `tools`. strict: those with enforced schemas."""
    callables = list(callable_tools(tools))
    rules = ["object: " + " | ".join(f"tool_{i}" for i in range(len(callables)))]
    for i, (name, parameters) in enumerate(callables):
        begin = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        is_held = strict is None or name in strict
        schema = arguments_schema(parameters) if is_held else {"type": "object"}
        rules += [
            f'tool_{i}: {begin} arguments_{i} "}}"',
            f"arguments_{i}: {_json(schema, options)}",
        ]
    return rules


def _json(schema: Any, options: dict[str, Any]) -> str:
    """A JSON grammar of `schema`, whose own options are replaced by `options`."""
    if isinstance(schema, dict):
        schema = schema | {"x-guidance": options}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def _optional(mark: Mark) -> str:
    return f"({_spell(mark)})?" if mark else ""


def _spell(mark: Mark) -> str:
    parts = (f"<[{p}]>" if isinstance(p, int) else json.dumps(p, ensure_ascii=False) for p in mark)
    return " ".join(parts)
