"""Parsers of tool calls whose arguments stand between tags, as plain text.

They read from left to right without backtracking: their time is proportional to the text. The
tool's schema decides whether `5` is a number or a string; a value that does not fit it stays a
string, for the client to validate.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Any
Tools = Sequence[Mapping[str, Any]]
ParsedCalls = list[tuple[str, Any]]
NAME = r"[\w.:-]+"
_BLANKS = re.compile(r"\s*")


def skip_blanks(text: str, at: int) -> int:
    """The index of the first character from `at` on that is no blank."""
    match = _BLANKS.match(text, at)
    return match.end() if match else at


@dataclass(frozen=True, slots=True)
class _Elements:
    """Elements of one kind, with only blanks between them.

    A closing tag counts where another element or the end of the text follows: elsewhere it is part
    of the element's text.
    """

    begin: str
    """The beginning of `opening`."""
    opening: re.Pattern[str]
    close: str
    may_stay_open: bool = False
    """Whether the last closing tag may be left out."""

    def read(self, text: str) -> Iterator[tuple[re.Match[str], str]]:
        """(opening tag, text) of each element. Raises ValueError for other text."""
        at = skip_blanks(text, 0)
        while at < len(text):
            match = self.opening.match(text, at)
            if match is None:
                raise ValueError(f"unreadable at character {at}")
            end, at = self._end(text, match.end())
            yield match, text[match.end() : end]

    def _end(self, text: str, at: int) -> tuple[int, int]:
        """(end of the element's text, beginning of the next element)."""
        while (end := text.find(self.close, at)) >= 0:
            at = skip_blanks(text, end + len(self.close))
            if at == len(text) or text.startswith(self.begin, at):
                return end, at
        if not self.may_stay_open:
            raise ValueError(f"no {self.close}")
        return len(text), len(text)


def _without_line_breaks(value: str) -> str:
    """`value` without the line breaks that templates write after and before tags."""
    return value.removeprefix("\n").removesuffix("\n")


def _arguments(name: str, items: Iterator[tuple[str, str]], tools: Tools) -> dict[str, Any]:
    root = _schema_of(name, tools)
    schemas = _resolve(root, root).get("properties") or {}
    arguments: dict[str, Any] = {}
    for key, value in items:
        if key in arguments:
            raise ValueError(f"two arguments are called {key}")
        arguments[key] = convert(value, schemas.get(key), root)
    return arguments


@dataclass(frozen=True, slots=True)
class _TaggedParser:
    """A parser of calls that are elements and contain their arguments as elements.

    The patterns of the opening tags have the groups `name` and `key`.
    """

    call: _Elements
    argument: _Elements

    def __call__(self, text: str, tools: Tools) -> ParsedCalls:
        calls = []
        for opening, body in self.call.read(text):
            items = (
                (found["key"].strip(), _without_line_breaks(value))
                for found, value in self.argument.read(body)
            )
            calls.append((opening["name"], _arguments(opening["name"], items, tools)))
        return calls


qwen3_coder = _TaggedParser(
    _Elements("<function=", re.compile(rf"<function=(?P<name>{NAME})>"), "</function>"),
    _Elements(
        "<parameter=",
        re.compile(r"<parameter=(?P<key>[^>\n]+)>"),
        "</parameter>",
        may_stay_open=True,
    ),
)
minimax_m2 = _TaggedParser(
    _Elements(
        "<invoke name=", re.compile(rf"<invoke name=[\"']?(?P<name>{NAME})[\"']?>"), "</invoke>"
    ),
    _Elements(
        "<parameter name=",
        re.compile(r"<parameter name=[\"']?(?P<key>[^>\n\"']+)[\"']?>"),
        "</parameter>",
    ),
)
_atem = _TaggedParser(
    _Elements(
        "<atem:invoke ",
        re.compile(r'<atem:invoke (?=[^>]*>)[^>]*?\bname="(?P<name>[^">]+)">'),
        "</atem:invoke>",
    ),
    _Elements(
        "<atem:parameter ",
        re.compile(r'<atem:parameter (?=[^>]*>)[^>]*?\bname="(?P<key>[^">]+)"[^>]*>'),
        "</atem:parameter>",
    ),
)


def atem(text: str, tools: Tools) -> ParsedCalls:
    """Optional reasoning, and calls after a further tag."""
    _, tag, calls = text.partition("<atem:function_calls>")
    return _atem(calls if tag else text[max(text.find("<atem:invoke "), 0) :], tools)


_GLM_NAME = re.compile(rf"\s*(?P<name>{NAME})\s*")
_GLM_KEY = re.compile(r"<arg_key>(?P<key>[^<]*)</arg_key>(?:\\n|\s)*<arg_value>")
_glm_arguments = _Elements("<arg_key>", _GLM_KEY, "</arg_value>")


def glm(text: str, tools: Tools) -> ParsedCalls:
    """`name`, then pairs of keys and values."""
    match = _GLM_NAME.match(text)
    if match is None:
        raise ValueError("no call")
    pairs = _glm_arguments.read(text[match.end() :])
    items = ((opening["key"].strip(), value) for opening, value in pairs)
    return [(match["name"], _arguments(match["name"], items, tools))]


# ---- the types of values -----------------------------------------------------------------------

_MAX_DEPTH = 16
_PYTHON = {"True": True, "False": False, "None": None}


def _schema_of(name: str, tools: Tools) -> Mapping[str, Any]:
    """The schema of the arguments of the tool called `name`; empty if there is none."""
    for tool in tools:
        function = tool.get("function") or {}
        if function.get("name") == name:
            return function.get("parameters") or {}
    return {}


def convert(text: str, schema: Any, root: Any) -> Json:
    """The value of `text` in a type that `schema` allows, whose references start at `root`.

    Without a type, or for None as the schema, JSON is decoded; other text stays a string.
    """
    kinds = _kinds(schema, root, 0)
    try:
        value = _read(text.strip(), allow_python=bool(kinds))
    except ValueError:
        return text
    kind = kind_of(value)
    if kind == "string" or (kinds and kinds <= {"string"}):
        return text
    if not kinds or kind in kinds or (kind == "integer" and "number" in kinds):
        return value
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    return text


def kind_of(value: Json) -> str:
    """The name of a value's type in JSON schemas."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
        case _:
            return "object"


def _read(text: str, *, allow_python: bool) -> Json:
    """The value of `text` as JSON, or Python if allowed. Raises ValueError if it is neither."""
    if allow_python and text in _PYTHON:
        return _PYTHON[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        if not allow_python or text[:1] not in ("{", "["):
            raise ValueError("no value") from None
    try:
        return ast.literal_eval(text)
    except Exception:  # noqa: BLE001 - it raises five kinds of errors for other text
        raise ValueError("no value") from None


def _kinds(schema: Any, root: Any, depth: int) -> set[str]:
    """The JSON types of the values that `schema` allows; empty if it does not name any."""
    schema = _resolve(schema, root)
    if depth > _MAX_DEPTH:
        return set()
    types = schema.get("type")
    if isinstance(types, str):
        return {types.lower()}
    if isinstance(types, list):
        return {name.lower() for name in types if isinstance(name, str)}
    if "const" in schema:
        return {kind_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        return {kind_of(value) for value in schema["enum"]}
    kinds: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        if isinstance(options, list):
            each_kinds = [_kinds(option, root, depth + 1) for option in options]
            if key != "allOf" and not all(each_kinds):
                return set()
            kinds = kinds.union(*each_kinds)
    if not kinds and "properties" in schema:
        return {"object"}
    if not kinds and "items" in schema:
        return {"array"}
    return kinds


def _resolve(schema: Any, root: Any) -> Mapping[str, Any]:
    """`schema`, or the target of its reference within `root`; empty if there is none."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for name in reference.removeprefix("#").strip("/").split("/"):
            schema = schema.get(name) if isinstance(schema, Mapping) and name else schema
    return {}
