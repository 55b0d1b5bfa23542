"""Gives arguments that a model wrote as plain text the types that a tool's schema asks for.

Some formats write each argument between tags, without JSON's quotes: whether `5` is a number or a
text is up to the schema. What does not fit it stays a text: the client validates it.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

_MAX_DEPTH = 16
_PYTHON = {"True": True, "False": False, "None": None}
Json = Any


def properties_of(name: str, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The schemas of the arguments of the tool called `name`; empty if they are not known."""
    for tool in tools:
        function = tool.get("function") or {}
        if function.get("name") == name:
            root = function.get("parameters") or {}
            found = _resolved(root, root).get("properties") or {}
            return {key: _Schema(value, root) for key, value in found.items()}
    return {}


def typed(text: str, schema: Any) -> Json:
    """`text` as `schema`, one of `properties_of`, has it; as JSON if it reads so, for None."""
    kinds = schema.kinds() if isinstance(schema, _Schema) else frozenset[str]()
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
    """The type that JSON schemas call it."""
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
    """The value that `text` spells in JSON, or Python. Raises ValueError if it does not."""
    if allow_python and text in _PYTHON:
        return _PYTHON[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        if not allow_python or text[:1] not in ("{", "["):
            raise ValueError("no value") from None
    try:
        return ast.literal_eval(text)
    except Exception:  # noqa: BLE001 - it raises five kinds for what is no literal
        raise ValueError("no value") from None


class _Schema:
    """A schema, and the root that its references start at."""

    def __init__(self, schema: Any, root: Any) -> None:
        self._schema = schema
        self._root = root

    def kinds(self) -> frozenset[str]:
        """The types of the values that it allows; empty if it does not say."""
        return frozenset(_kinds(self._schema, self._root, 0))


def _kinds(schema: Any, root: Any, depth: int) -> set[str]:
    schema = _resolved(schema, root)
    if depth > _MAX_DEPTH:
        return set()
    named = schema.get("type")
    if isinstance(named, str):
        return {named.lower()}
    if isinstance(named, list):
        return {each.lower() for each in named if isinstance(each, str)}
    if "const" in schema:
        return {kind_of(schema["const"])}
    if isinstance(schema.get("enum"), list):
        return {kind_of(each) for each in schema["enum"]}
    found: set[str] = set()
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        if isinstance(options, list):
            each_kinds = [_kinds(option, root, depth + 1) for option in options]
            if key != "allOf" and not all(each_kinds):
                return set()
            found = found.union(*each_kinds)
    if not found and "properties" in schema:
        return {"object"}
    if not found and "items" in schema:
        return {"array"}
    return found


def _resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """What a reference within `root` leads to; empty if there is nothing."""
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
