"""Parsers of tool calls for formats that mlx-vlm reads wrongly, or reads where there is no call.

Each takes the text between the format's marks and the tools, and returns (name, arguments) for each
call, or raises any error. Nothing is guessed: text that is left over makes it no call.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_server.runner.model.typed_arguments import properties_of, typed

Tools = Sequence[Mapping[str, Any]]
Calls = list[tuple[str, Any]]
_NAME = r"[\w.:-]+"


# ---- arguments between tags --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaggedParser:
    """Formats that write each argument between tags, its value as plain text.

    call: matches one call, with the groups `name` and `body`. argument: matches one argument in it,
    with the groups `key` and `value`.
    """

    call: re.Pattern[str]
    argument: re.Pattern[str]

    def __call__(self, text: str, tools: Tools) -> Calls:
        calls = [self._read(found, tools) for found in self.call.finditer(text)]
        if self.call.sub("", text).strip():
            raise ValueError("there is more than calls")
        return calls

    def _read(self, call: re.Match[str], tools: Tools) -> tuple[str, Any]:
        name, body = call["name"].strip(), call["body"]
        if self.argument.sub("", body).strip():
            raise ValueError("there is more than arguments")
        schemas = properties_of(name, tools)
        arguments: dict[str, Any] = {}
        for found in self.argument.finditer(body):
            key, value = found["key"].strip(), found["value"]
            if key in arguments:
                raise ValueError(f"two arguments are called {key}")
            arguments[key] = typed(value, schemas.get(key))
        return name, arguments


qwen3_coder = TaggedParser(
    re.compile(
        rf"<function=(?P<name>{_NAME})>(?P<body>.*?)</function>(?=\s*(?:<function=|\Z))", re.DOTALL
    ),
    re.compile(
        r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?"
        r"(?:</parameter>(?=\s*(?:<parameter=|\Z))|\Z)",
        re.DOTALL,
    ),
)
"""The last argument's closing tag may be left out."""
minimax_m2 = TaggedParser(
    re.compile(rf"<invoke name=[\"']?(?P<name>{_NAME})[\"']?>(?P<body>.*?)</invoke>", re.DOTALL),
    re.compile(
        r"<parameter name=[\"']?(?P<key>[^>\n\"']+)[\"']?>\n?(?P<value>.*?)\n?</parameter>",
        re.DOTALL,
    ),
)
_glm = TaggedParser(
    re.compile(rf"\A\s*(?P<name>{_NAME})\s*(?P<body>(?:<arg_key>.*)?)\Z", re.DOTALL),
    re.compile(
        r"<arg_key>(?P<key>.*?)</arg_key>(?:\\n|\s)*<arg_value>(?P<value>.*?)</arg_value>",
        re.DOTALL,
    ),
)


def glm47(text: str, tools: Tools) -> Calls:
    """`name`, then pairs of keys and values; some checkpoints write JSON."""
    if text.lstrip().startswith("{"):
        return from_json(json.loads(text))
    return _glm(text, tools)


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
    decoder, calls, rest = json.JSONDecoder(), Calls(), text.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        calls += from_json(value)
        rest = rest[end:].lstrip()
    return calls


_MISTRAL = re.compile(rf"\s*(?P<name>{_NAME})(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\]\s*)?(?=\{{)")


def mistral(text: str, tools: Tools) -> Calls:
    """`name[ARGS]{...}`, with an id between perhaps, or a JSON list; each call has its mark."""
    del tools
    if text.lstrip()[:1] in ("[", "{"):
        return _json_values(text.replace("[TOOL_CALLS]", "\n"))
    decoder, calls, rest = json.JSONDecoder(), Calls(), text.rstrip()
    while rest:
        found = _MISTRAL.match(rest)
        if found is None:
            raise ValueError("no call")
        arguments, end = decoder.raw_decode(rest, found.end())
        calls.append((found["name"], arguments))
        rest = rest[end:].lstrip().removeprefix("[TOOL_CALLS]")
    return calls


# ---- Python --------------------------------------------------------------------------------


class _JsonNames(ast.NodeTransformer):
    """JSON's names of constants in Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        constants = {"true": True, "false": False, "null": None}
        return ast.Constant(constants[node.id]) if node.id in constants else node


def pythonic(text: str, tools: Tools) -> Calls:
    """`[name(key=value, ...), ...]`. Names of tools need not be Python's."""
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
