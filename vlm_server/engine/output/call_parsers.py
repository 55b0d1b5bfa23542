"""Parsers of tool calls in formats that mlx-vlm parses wrongly.

Each maps (text between the format's marks, tools) to (name, arguments) of each call, or raises any
error, also for text after the last call.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from vlm_server.engine.output.tagged_calls import NAME, ParsedCalls, Tools, glm, skip_blanks

MAX_SYNTAX_CHARACTERS = 64 << 10
"""Length limit of texts for parsers whose time has no bound."""


# ---- arguments between tags --------------------------------------------------------------


def glm47(text: str, tools: Tools) -> ParsedCalls:
    """`name`, then pairs of keys and values; some checkpoints write JSON."""
    if text.lstrip().startswith("{"):
        return from_json(json.loads(text))
    return glm(text, tools)


def longcat(text: str, tools: Tools) -> ParsedCalls:
    """`glm47` with other tags."""
    return glm47(re.sub(r"(</?)longcat_(arg_(?:key|value)>)", r"\1\2", text), tools)


# ---- JSON ----------------------------------------------------------------------------------


def from_json(value: Any) -> ParsedCalls:
    """The calls of most JSON formats: an object, or a list of objects."""
    return [_from_object(call) for call in (value if isinstance(value, list) else [value])]


def _from_object(call: Any) -> tuple[str, Any]:
    inner = call.get("function")
    call = inner if isinstance(inner, dict) else call
    name = call.get("name") or call.get("tool_name") or inner
    keys = [key for key in ("arguments", "parameters", "input") if key in call]
    return name, call[keys[0]] if keys else {}


def json_tools(text: str, tools: Tools) -> ParsedCalls:
    """`{"name": ..., "arguments": {...}}`, or several on separate lines."""
    del tools
    return _json_values(text)


def cohere2_moe(text: str, tools: Tools) -> ParsedCalls:
    """A JSON list, in which regular expressions may have escapes that JSON does not allow."""
    del tools
    try:
        return from_json(json.loads(text))
    except ValueError:
        return from_json(json.loads(text.replace("\\|", "|")))


def _json_values(text: str) -> ParsedCalls:
    decoder, calls, at = json.JSONDecoder(), ParsedCalls(), skip_blanks(text, 0)
    while at < len(text):
        value, end = decoder.raw_decode(text, at)
        calls += from_json(value)
        at = skip_blanks(text, end)
    return calls


_MISTRAL = re.compile(rf"(?P<name>{NAME})(?:\[CALL_ID\]\w*)?\s*(?:\[ARGS\]\s*)?(?=\{{)")


def mistral(text: str, tools: Tools) -> ParsedCalls:
    """`name[ARGS]{...}`, perhaps with an id, or a JSON list; each call has its mark."""
    del tools
    decoder, calls, at = json.JSONDecoder(), ParsedCalls(), skip_blanks(text, 0)
    if text[at : at + 1] in ("[", "{"):
        return _json_values(text)
    while at < len(text):
        match = _MISTRAL.match(text, at)
        if match is None:
            raise ValueError("no call")
        arguments, end = decoder.raw_decode(text, match.end())
        calls.append((match["name"], arguments))
        at = skip_blanks(text, end)
        at += len("[TOOL_CALLS]") if text.startswith("[TOOL_CALLS]", at) else 0
    return calls


# ---- JSON behind a header ------------------------------------------------------------------

_KIMI_BEGIN, _KIMI_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_KIMI = re.compile(rf"\s*(?P<name>{NAME}):\d+\s*<\|tool_call_argument_begin\|>\s*")
_HARMONY = re.compile(r"\s*(?P<name>[^\s<|]+)")


def kimi_k2(text: str, tools: Tools) -> ParsedCalls:
    """`functions.name:0`, a mark and JSON; each call stands between further marks."""
    calls, at = ParsedCalls(), skip_blanks(text, 0)
    while at < len(text):
        if not text.startswith(_KIMI_BEGIN, at):
            raise ValueError("no call")
        match = _KIMI.match(text, at + len(_KIMI_BEGIN))
        if match is None:
            raise ValueError("a call has no name")
        arguments: Any = {}
        at = match.end()
        if not text.startswith(_KIMI_END, at):
            arguments, at = json.JSONDecoder().raw_decode(text, at)
        at = skip_blanks(text, at)
        if not text.startswith(_KIMI_END, at):
            raise ValueError("a call is cut short")
        at = skip_blanks(text, at + len(_KIMI_END))
        calls.append((_tool_called(match["name"], tools), arguments))
    return calls


def harmony(text: str, tools: Tools) -> ParsedCalls:
    """`functions.name`, perhaps a content type, a mark and JSON."""
    header, _, arguments = text.partition("<|message|>")
    match = _HARMONY.match(header)
    if match is None:
        raise ValueError("a call has no name")
    return [(_tool_called(match["name"], tools), arguments)]


def _tool_called(name: str, tools: Tools) -> str:
    """The tool that `name` refers to, with or without the prefix `functions.`."""
    bare = name.removeprefix("functions.")
    names = {(tool.get("function") or {}).get("name") for tool in tools}
    return name if name in names and bare not in names else bare


# ---- Python --------------------------------------------------------------------------------


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        constants = {"true": True, "false": False, "null": None}
        return ast.Constant(constants[node.id]) if node.id in constants else node


def pythonic(text: str, tools: Tools) -> ParsedCalls:
    """`[name(key=value, ...), ...]`. Names of tools need not be Python identifiers."""
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
    return [_python_call(element, aliases) for element in elements]


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


# ---- Gemma 4 --------------------------------------------------------------------------------

_GEMMA_QUOTE = '<|"|>'
_GEMMA_CALL = re.compile(r"(?:call)?:?\s*(?P<name>[\w.:-]+?)\s*(?=\{)")
_GEMMA_KEY = re.compile(r'\s*(?:"(?P<quoted>[^"]*)"|(?P<bare>[^\s:{}\[\],"]+))\s*:')
_GEMMA_LITERAL = re.compile(r"[^,{}\[\]]+")
_MAX_DEPTH = 64


def gemma4(text: str, tools: Tools) -> ParsedCalls:
    """`call:name{key:<|"|>text<|"|>,other:[1,2]}`, repeated.

    Strings stand between special marks, and may contain any characters of JSON's syntax.
    """
    del tools
    reader, calls = _GemmaReader(text), ParsedCalls()
    while not reader.is_at_end:
        reader.skip_space()
        name = reader.match(_GEMMA_CALL)["name"]
        calls.append((name, reader.value(0)))
    return calls


class _GemmaReader:
    """A reader of Gemma's calls at a position in their text."""

    def __init__(self, text: str) -> None:
        self._text = text.rstrip()
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at >= len(self._text)

    def match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError(f"unreadable at character {self._at}")
        self._at = match.end()
        return match

    def value(self, depth: int) -> Any:
        self.skip_space()
        if depth > _MAX_DEPTH:
            raise ValueError("too deep")
        if self._takes("{"):
            return dict(self._items("}", depth, with_keys=True))
        if self._takes("["):
            return [value for _, value in self._items("]", depth, with_keys=False)]
        if self._takes(_GEMMA_QUOTE):
            return self._quoted()
        if self._text.startswith('"', self._at):
            value, self._at = json.JSONDecoder().raw_decode(self._text, self._at)
            return value
        literal = self.match(_GEMMA_LITERAL)[0].strip()
        try:
            return json.loads(literal)
        except ValueError:
            return literal

    def _items(self, close: str, depth: int, *, with_keys: bool) -> list[tuple[str, Any]]:
        items: list[tuple[str, Any]] = []
        self.skip_space()
        while not self._takes(close):
            if items and not self._takes(","):
                raise ValueError(f"unreadable at character {self._at}")
            key = self._key() if with_keys else ""
            items.append((key, self.value(depth + 1)))
            self.skip_space()
        return items

    def _key(self) -> str:
        self.skip_space()
        if self._takes(_GEMMA_QUOTE):
            key = self._quoted()
            self.skip_space()
            if not self._takes(":"):
                raise ValueError("a key without a value")
            return key
        match = self.match(_GEMMA_KEY)
        return match["bare"] if match["quoted"] is None else match["quoted"]

    def _quoted(self) -> str:
        end = self._text.find(_GEMMA_QUOTE, self._at)
        if end < 0:
            raise ValueError("a text without an end")
        text, self._at = self._text[self._at : end], end + len(_GEMMA_QUOTE)
        return text

    def _takes(self, mark: str) -> bool:
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True

    def skip_space(self) -> None:
        self._at = skip_blanks(self._text, self._at)
