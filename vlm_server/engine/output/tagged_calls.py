"""Parsers of tool calls whose arguments stand between tags, their values as plain text.

They read from left to right and never go back, so that time is in proportion to the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_server.engine.output.typed_arguments import properties_of, typed

Tools = Sequence[Mapping[str, Any]]
Calls = list[tuple[str, Any]]
NAME = r"[\w.:-]+"
_BLANKS = re.compile(r"\s*")


def skip_blanks(text: str, at: int) -> int:
    """Where something else begins."""
    found = _BLANKS.match(text, at)
    return found.end() if found else at


@dataclass(frozen=True, slots=True)
class _Elements:
    """Elements of one kind, with nothing but blanks between them.

    opening: the tag before one, which begins with `begin`. A closing tag counts where another
    element or the end of the text follows: elsewhere it is a part of what it would close.
    """

    begin: str
    opening: re.Pattern[str]
    close: str
    may_stay_open: bool = False
    """Whether the last closing tag may be left out."""

    def read(self, text: str) -> Iterator[tuple[re.Match[str], str]]:
        """(opening tag, what stands behind it) of each. Raises ValueError for anything else."""
        at = skip_blanks(text, 0)
        while at < len(text):
            found = self.opening.match(text, at)
            if found is None:
                raise ValueError(f"unreadable at character {at}")
            end, at = self._end(text, found.end())
            yield found, text[found.end() : end]

    def _end(self, text: str, at: int) -> tuple[int, int]:
        """(where the element's text ends, where the next one begins)."""
        while (end := text.find(self.close, at)) >= 0:
            at = skip_blanks(text, end + len(self.close))
            if at == len(text) or text.startswith(self.begin, at):
                return end, at
        if not self.may_stay_open:
            raise ValueError(f"no {self.close}")
        return len(text), len(text)


def _without_line_breaks(value: str) -> str:
    """`value` without those that templates write beside tags."""
    return value.removeprefix("\n").removesuffix("\n")


def _arguments(name: str, items: Iterator[tuple[str, str]], tools: Tools) -> dict[str, Any]:
    schemas = properties_of(name, tools)
    arguments: dict[str, Any] = {}
    for key, value in items:
        if key in arguments:
            raise ValueError(f"two arguments are called {key}")
        arguments[key] = typed(value, schemas.get(key))
    return arguments


@dataclass(frozen=True, slots=True)
class _TaggedParser:
    """Calls that are elements, with arguments that are elements in them.

    The opening tags have the groups `name` and `key`.
    """

    call: _Elements
    argument: _Elements

    def __call__(self, text: str, tools: Tools) -> Calls:
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


def atem(text: str, tools: Tools) -> Calls:
    """A thought, perhaps, and calls behind a tag of their own."""
    _, tag, calls = text.partition("<atem:function_calls>")
    return _atem(calls if tag else text[max(text.find("<atem:invoke "), 0) :], tools)


_GLM_NAME = re.compile(rf"\s*(?P<name>{NAME})\s*")
_GLM_KEY = re.compile(r"<arg_key>(?P<key>[^<]*)</arg_key>(?:\\n|\s)*<arg_value>")
_glm_arguments = _Elements("<arg_key>", _GLM_KEY, "</arg_value>")


def glm(text: str, tools: Tools) -> Calls:
    """`name`, then pairs of keys and values."""
    found = _GLM_NAME.match(text)
    if found is None:
        raise ValueError("no call")
    pairs = _glm_arguments.read(text[found.end() :])
    items = ((opening["key"].strip(), value) for opening, value in pairs)
    return [(found["name"], _arguments(found["name"], items, tools))]
