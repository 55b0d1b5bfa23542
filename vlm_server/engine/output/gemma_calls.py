"""Reads Gemma 4's tool calls: `call:name{key:<|"|>text<|"|>,other:[1,2]}`.

Texts stand between marks of their own, and may hold whatever JSON's syntax is made of.
"""

from __future__ import annotations

import json
import re
from typing import Any

_QUOTE = '<|"|>'
_CALL = re.compile(r"(?:call)?:?\s*(?P<name>[\w.:-]+?)\s*(?=\{)")
_KEY = re.compile(r'\s*(?:"(?P<quoted>[^"]*)"|(?P<bare>[^\s:{}\[\],"]+))\s*:')
_BLANKS = re.compile(r"\s*")
_LITERAL = re.compile(r"[^,{}\[\]]+")
_MAX_DEPTH = 64


def parse(text: str) -> list[tuple[str, Any]]:
    """(name, arguments) of each call. Raises ValueError for what is cut short or left over."""
    reader, calls = _Reader(text), []
    while not reader.is_at_end:
        reader.match(_BLANKS)
        name = reader.match(_CALL)["name"]
        calls.append((name, reader.value(0)))
    if not calls:
        raise ValueError("no call")
    return calls


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text.rstrip()
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at >= len(self._text)

    def match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self._text, self._at)
        if found is None:
            raise ValueError(f"unreadable at character {self._at}")
        self._at = found.end()
        return found

    def value(self, depth: int) -> Any:
        self._skip_space()
        if depth > _MAX_DEPTH:
            raise ValueError("too deep")
        if self._takes("{"):
            return dict(self._items("}", depth, with_keys=True))
        if self._takes("["):
            return [value for _, value in self._items("]", depth, with_keys=False)]
        if self._takes(_QUOTE):
            return self._quoted()
        if self._text.startswith('"', self._at):
            value, self._at = json.JSONDecoder().raw_decode(self._text, self._at)
            return value
        literal = self.match(_LITERAL)[0].strip()
        try:
            return json.loads(literal)
        except ValueError:
            return literal

    def _items(self, close: str, depth: int, *, with_keys: bool) -> list[tuple[str, Any]]:
        items: list[tuple[str, Any]] = []
        self._skip_space()
        while not self._takes(close):
            if items and not self._takes(","):
                raise ValueError(f"unreadable at character {self._at}")
            key = self._key() if with_keys else ""
            items.append((key, self.value(depth + 1)))
            self._skip_space()
        return items

    def _key(self) -> str:
        self._skip_space()
        if self._takes(_QUOTE):
            key = self._quoted()
            self._skip_space()
            if not self._takes(":"):
                raise ValueError("a key without a value")
            return key
        found = self.match(_KEY)
        return found["bare"] if found["quoted"] is None else found["quoted"]

    def _quoted(self) -> str:
        end = self._text.find(_QUOTE, self._at)
        if end < 0:
            raise ValueError("a text without an end")
        text, self._at = self._text[self._at : end], end + len(_QUOTE)
        return text

    def _takes(self, mark: str) -> bool:
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True

    def _skip_space(self) -> None:
        self.match(_BLANKS)
