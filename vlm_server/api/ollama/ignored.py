"""Which fields of a request have no effect: they are named in the log and in a header."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from vlm_server.api.http.intake import json_body
from vlm_server.api.ollama.schema import (
    Function,
    FunctionCall,
    ModelOptions,
    Request,
    Tool,
    ToolCall,
)

MAX_NAMES = 32

_OF_ALL_ROLES = frozenset({"role", "content", "images"})
_OF_ROLE = {
    "assistant": frozenset({"thinking", "tool_calls"}),
    "tool": frozenset({"tool_name", "name", "tool_call_id"}),
}


def ignored_fields(fields: dict[str, Any], schema: type[Request]) -> tuple[str, ...]:
    """The paths of fields without effect, `messages[].name` say; at most `MAX_NAMES`.

    `fields` is what was converted to a `schema`.
    """
    names = dict[str, None]()
    for name in _ignored(fields, schema):
        names[_as_ascii(name)] = None
        if len(names) == MAX_NAMES:
            break
    return tuple(names)


def _ignored(fields: dict[str, Any], schema: type[Request]) -> Iterator[str]:
    yield from _others(fields, _names(schema) - {"keep_alive"}, "")
    yield from _others(fields.get("options") or {}, _names(ModelOptions), "options.")
    if "messages" not in _names(schema):
        return
    for message in fields.get("messages") or ():
        known = _OF_ALL_ROLES | _OF_ROLE.get(message["role"], frozenset())
        yield from _others(message, known, "messages[].")
        if message["role"] == "assistant":
            calls = message.get("tool_calls") or ()
            yield from _of_functions(calls, ToolCall, FunctionCall, "messages[].tool_calls[].")
    yield from _of_functions(fields.get("tools") or (), Tool, Function, "tools[].")


def _of_functions(
    items: Iterable[dict[str, Any]],
    outer: type[msgspec.Struct],
    inner: type[msgspec.Struct],
    path: str,
) -> Iterator[str]:
    for item in items:
        yield from _others(item, _names(outer), path)
        yield from _others(item["function"], _names(inner), f"{path}function.")


def _others(fields: dict[str, Any], known: frozenset[str], path: str) -> Iterator[str]:
    for name, value in fields.items():
        if name not in known and value is not None:
            yield f"{path}{json_body.shown(name)}"


def _names(schema: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(schema.__struct_fields__)


def _as_ascii(name: str) -> str:
    """`name` as a header may have it in a list."""
    return "".join(c if c.isascii() and c != "," else "?" for c in name)
