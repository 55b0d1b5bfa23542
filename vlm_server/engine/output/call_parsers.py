"""Parsers of tool calls for formats that mlx-vlm reads wrongly, or reads where there is no call.

Each takes the text between the format's marks and the tools, and returns (name, arguments) for each
call, or raises any error. Nothing is guessed: text that is left over makes it no call.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from vlm_server.engine.output.tagged_calls import NAME, Calls, Tools, glm, skip_blanks

MAX_SYNTAX_CHARACTERS = 64 << 10
"""Of texts for parsers of others, whose time nobody bounds."""


# ---- arguments between tags --------------------------------------------------------------


def glm47(text: str, tools: Tools) -> Calls:
    """`name`, then pairs of keys and values; some checkpoints write JSON."""
    if text.lstrip().startswith("{"):
        return from_json(json.loads(text))
    return glm(text, tools)


def longcat(text: str, tools: Tools) -> Calls:
    """As `glm47`, under other names."""
    return glm47(re.sub(r"(</?)longcat_(arg_(?:key|value)>)", r"\1\2", text), tools)


# ---- JSON ----------------------------------------------------------------------------------


def from_json(value: Any) -> Calls:
    """Calls as most formats with JSON have them: an object, or a list of them."""
    return [_from_object(each) for each in (value if isinstance(value, list) else [value])]


def _from_object(call: Any) -> tuple[str, Any]:
    inner = call.get("function")
    call = inner if isinstance(inner, dict) else call
    name = call.get("name") or call.get("tool_name") or inner
    keys = [key for key in ("arguments", "parameters", "input") if key in call]
    return name, call[keys[0]] if keys else {}


def json_tools(text: str, tools: Tools) -> Calls:
    """`{"name": ..., "arguments": {...}}`, or several on lines of their own."""
    del tools
    return _json_values(text)


def cohere2_moe(text: str, tools: Tools) -> Calls:
    """A JSON list, in which regular expressions may have escapes that JSON does not know."""
    del tools
    try:
        return from_json(json.loads(text))
    except ValueError:
        return from_json(json.loads(text.replace("\\|", "|")))


def _json_values(text: str) -> Calls:
    decoder, calls, at = json.JSONDecoder(), Calls(), skip_blanks(text, 0)
    while at < len(text):
        value, end = decoder.raw_decode(text, at)
        calls += from_json(value)
        at = skip_blanks(text, end)
    return calls


_MISTRAL = re.compile(rf"(?P<name>{NAME})(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\]\s*)?(?=\{{)")


def mistral(text: str, tools: Tools) -> Calls:
    """`name[ARGS]{...}`, with an id between perhaps, or a JSON list; each call has its mark."""
    del tools
    decoder, calls, at = json.JSONDecoder(), Calls(), skip_blanks(text, 0)
    if text[at : at + 1] in ("[", "{"):
        return _json_values(text)
    while at < len(text):
        found = _MISTRAL.match(text, at)
        if found is None:
            raise ValueError("no call")
        arguments, end = decoder.raw_decode(text, found.end())
        calls.append((found["name"], arguments))
        at = skip_blanks(text, end)
        at += len("[TOOL_CALLS]") if text.startswith("[TOOL_CALLS]", at) else 0
    return calls


# ---- JSON behind a header ------------------------------------------------------------------

_KIMI_BEGIN, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI = re.compile(rf"\s*(?P<name>{NAME}):\d+\s*<\|tool_call_argument_begin\|>\s*")
_HARMONY = re.compile(r"\s*(?P<name>[^\s<|]+)")


def kimi_k2(text: str, tools: Tools) -> Calls:
    """`functions.name:0`, a mark and JSON, each call between marks of its own."""
    calls, at = Calls(), skip_blanks(text, 0)
    while at < len(text):
        if not text.startswith(_KIMI_BEGIN, at):
            raise ValueError("no call")
        found = _KIMI.match(text, at + len(_KIMI_BEGIN))
        if found is None:
            raise ValueError("a call has no name")
        arguments: Any = {}
        at = found.end()
        if not text.startswith(_KIMI_END, at):
            arguments, at = json.JSONDecoder().raw_decode(text, at)
        at = skip_blanks(text, at)
        if not text.startswith(_KIMI_END, at):
            raise ValueError("a call is cut short")
        at = skip_blanks(text, at + len(_KIMI_END))
        calls.append((_tool_called(found["name"], tools), arguments))
    return calls


def harmony(text: str, tools: Tools) -> Calls:
    """`functions.name`, perhaps what kind of text comes, a mark and JSON."""
    header, _, arguments = text.partition("<|message|>")
    found = _HARMONY.match(header)
    if found is None:
        raise ValueError("a call has no name")
    return [(_tool_called(found["name"], tools), arguments)]


def _tool_called(name: str, tools: Tools) -> str:
    """The tool that is meant by `name`, with `functions.` before it, or, carelessly, without."""
    bare = name.removeprefix("functions.")
    names = {(tool.get("function") or {}).get("name") for tool in tools}
    return name if name in names and bare not in names else bare


# ---- Python --------------------------------------------------------------------------------


class _JsonNames(ast.NodeTransformer):
    """JSON's names of constants in Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        constants = {"true": True, "false": False, "null": None}
        return ast.Constant(constants[node.id]) if node.id in constants else node


def pythonic(text: str, tools: Tools) -> Calls:
    """`[name(key=value, ...), ...]`. Names of tools need not be Python's."""
    if len(text) > MAX_SYNTAX_CHARACTERS:
        raise ValueError("it is too long")
    aliases: dict[str, str] = {}
    for index, tool in enumerate(tools):
        name = str((tool.get("function") or {}).get("name"))
        if not name.isidentifier():
            aliases[f"tool_{index}_"] = name
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?=\()", f"tool_{index}_", text)
    expression = ast.parse(text.strip(), mode="eval").body
    elements = expression.elts if isinstance(expression, ast.List) else [expression]
    return [_python_call(each, aliases) for each in elements]


def _python_call(call: ast.expr, aliases: Mapping[str, str]) -> tuple[str, Any]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no call by keywords")
    arguments: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("an argument has no name of its own")
        arguments[keyword.arg] = ast.literal_eval(_JsonNames().visit(keyword.value))
    name = ast.unparse(call.func)
    return aliases.get(name, name), arguments
