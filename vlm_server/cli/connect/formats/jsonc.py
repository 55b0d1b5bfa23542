"""JSON, and JSON with comments and trailing commas, edited in place.

A scanner finds where each member lies; the text between members, comments included, is kept.
"""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]  # typeshed leaves it out
from typing import Any, NamedTuple

from vlm_server.cli.connect.tree import MISSING, Path, Unusable, get

EMPTY = "{}\n"
HAS_NAMED_ITEMS = False
_GAP = re.compile(r"(?:[\s\ufeff]|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_REST_OF_LINE = re.compile(r"(?:[ \t]|/\*.*?\*/)*(?://[^\n]*)?", re.DOTALL)
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null")
_INDENT = re.compile(r"\n([ \t]*)[^\s]")
_MAX_DEPTH = 100


class _Node(NamedTuple):
    """A value, and where its text begins and ends; of an object also its members."""

    start: int
    end: int
    value: Any
    members: tuple[_Member, ...] = ()


class _Member(NamedTuple):
    start: int
    name: str
    node: _Node


def parse(text: str) -> dict[str, Any]:
    """The object in `text`; of equal names the last holds. Raises Unusable."""
    value: dict[str, Any] = _root(text).value
    return value


def put(text: str, path: Path, value: Any) -> str:
    """`text` with `value` at `path`; of an object that is there, only what differs is changed."""
    old = get(_root(text).value, path)
    if isinstance(old, dict) and isinstance(value, dict):
        for name in old.keys() - value.keys():
            text = drop(text, (*path, name))
        for name, inner_value in value.items():
            if inner_value != old.get(name, MISSING):
                text = put(text, (*path, name), inner_value)
        return text
    holder, rest = _root(text), list(path)
    while rest and (inner := _member(holder, rest[0])) is not None:
        rest.pop(0)
        if not rest or not isinstance(inner.node.value, dict):
            for name in reversed(rest):
                value = {name: value}
            new = _render(text, inner.start, value)
            return text[: inner.node.start] + new + text[inner.node.end :]
        holder = inner.node
    for name in reversed(rest[1:]):
        value = {name: value}
    return _insert(text, holder, rest[0], value)


def drop(text: str, path: Path) -> str:
    """`text` without the member at `path`, which is there."""
    holder = _root(text)
    for name in path[:-1]:
        member = _member(holder, name)
        assert member is not None
        holder = member.node
    index = max(i for i, member in enumerate(holder.members) if member.name == path[-1])
    member = holder.members[index]
    end = _gap(text, member.node.end)
    has_comma = text[end] == ","
    end = end + 1 if has_comma else member.node.end
    start = len(text[: member.start].rstrip(" \t"))
    is_last_of_line = text[end:].lstrip(" \t").startswith("\n")
    start -= is_last_of_line and text[start - 1] == "\n"
    before = text[:start]
    if not has_comma and index:  # a comma may not precede the closing brace
        comma = text.index(",", _gap(text, holder.members[index - 1].node.end))
        before = text[:comma] + text[comma + 1 : start]
    if (
        len(holder.members) == 1
        and not (before[holder.start + 1 :] + text[end : holder.end - 1]).strip()
    ):
        return text[: holder.start] + "{}" + text[holder.end :]
    return before + text[end:]


def _insert(text: str, holder: _Node, name: str, value: Any) -> str:
    """`text` with a new last member of `holder`."""
    if not holder.members:
        return _insert_first(text, holder, name, value)
    last = holder.members[-1]
    comma = _gap(text, last.node.end)
    has_comma = text[comma] == ","
    end = comma + 1 if has_comma else last.node.end
    if "\n" not in text[holder.start : last.start]:
        member = f"{_quoted(name)}: {json.dumps(value, ensure_ascii=False)}"
        return f"{text[:end]}{'' if has_comma else ','} {member}{text[end:]}"
    indent = _line_indent(text, holder.members[0].start)
    member = f"\n{indent}{_quoted(name)}: {_dump(value, _unit(text), indent)}"
    rest_of_line = _REST_OF_LINE.match(text, end)  # a comment on the last member
    assert rest_of_line is not None
    comment = rest_of_line[0].rstrip(" \t")
    before, after = ("", ",") if has_comma else (",", "")
    return f"{text[:end]}{before}{comment}{member}{after}{text[end + len(comment) :]}"


def _insert_first(text: str, holder: _Node, name: str, value: Any) -> str:
    """`text` with the only member of `holder`, before the comments that it may hold."""
    outer = _line_indent(text, holder.start)
    indent = outer + _unit(text)
    member = f"\n{indent}{_quoted(name)}: {_dump(value, _unit(text), indent)}"
    start, end = holder.start + 1, holder.end - 1
    comments = text[start:end] if text[start:end].strip() else f"\n{outer}"
    return f"{text[:start]}{member}{comments}{text[end:]}"


def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _gap(text: str, start: int) -> int:
    """Where the whitespace and the comments from `start` on end."""
    match = _GAP.match(text, start)
    assert match is not None
    return match.end()


def _render(text: str, member_start: int, value: Any) -> str:
    return _dump(value, _unit(text), _line_indent(text, member_start))


def _dump(value: Any, unit: str, indent: str) -> str:
    lines = json.dumps(value, ensure_ascii=False, indent=unit).split("\n")
    return f"\n{indent}".join(lines)


def _unit(text: str) -> str:
    """The indentation of the first member."""
    match = _INDENT.search(text)
    return (match[1] if match else "") or "  "


def _line_indent(text: str, position: int) -> str:
    line = text[text.rfind("\n", 0, position) + 1 : position]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _member(holder: _Node, name: str) -> _Member | None:
    return next((m for m in reversed(holder.members) if m.name == name), None)


def _root(text: str) -> _Node:
    scanner = _Scanner(text)
    node = scanner.node(_gap(text, 0), 0)
    if (end := _gap(text, node.end)) != len(text):
        raise scanner.fault("something follows the closing brace", end)
    if not isinstance(node.value, dict):
        raise scanner.fault("it is not an object", node.start)
    return node


class _Scanner:
    """Turns text into nodes. All methods raise Unusable."""

    def __init__(self, text: str) -> None:
        self._text = text

    def fault(self, reason: str, position: int) -> Unusable:
        return Unusable(reason, self._text.count("\n", 0, position) + 1)

    def node(self, start: int, depth: int) -> _Node:
        if depth > _MAX_DEPTH:
            raise self.fault("too many levels", start)
        match self._text[start : start + 1]:
            case "{":
                return self._object(start, depth)
            case "[":
                return self._array(start, depth)
            case '"':
                value, end = self._string(start)
                return _Node(start, end, value)
        if (scalar := _SCALAR.match(self._text, start)) is None:
            raise self.fault("a value is expected", start)
        try:
            return _Node(start, scalar.end(), json.loads(scalar[0]))
        except ValueError:  # an integer of thousands of digits
            raise self.fault("a number is too long", start) from None

    def _string(self, start: int) -> tuple[str, int]:
        if self._text[start : start + 1] != '"':
            raise self.fault("a name in double quotes is expected", start)
        try:
            value, end = scanstring(self._text, start + 1, True)
        except json.JSONDecodeError as error:
            raise self.fault(error.msg, error.pos) from None
        return value, end

    def _object(self, start: int, depth: int) -> _Node:
        members: list[_Member] = []
        position = _gap(self._text, start + 1)
        while self._text[position : position + 1] != "}":
            name, end = self._string(position)
            colon = _gap(self._text, end)
            if self._text[colon : colon + 1] != ":":
                raise self.fault("a colon is expected", colon)
            node = self.node(_gap(self._text, colon + 1), depth + 1)
            members.append(_Member(position, name, node))
            position = self._after(node.end, "}")
        value = {member.name: member.node.value for member in members}
        return _Node(start, position + 1, value, tuple(members))

    def _array(self, start: int, depth: int) -> _Node:
        values = []
        position = _gap(self._text, start + 1)
        while self._text[position : position + 1] != "]":
            node = self.node(position, depth + 1)
            values.append(node.value)
            position = self._after(node.end, "]")
        return _Node(start, position + 1, values)

    def _after(self, end: int, closing: str) -> int:
        """Where the next value, or `closing`, begins."""
        position = _gap(self._text, end)
        mark = self._text[position : position + 1]
        if mark not in (",", closing) or not mark:
            raise self.fault(f"a comma or {closing} is expected", position)
        return _gap(self._text, position + 1) if mark == "," else position
