"""Tool calls under `tool_choice: required`: JSON that a grammar ensures, parsed as a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from vlm_server.engine.output.auto_calls import JsonBody
from vlm_server.engine.output.calls import Calls
from vlm_server.engine.output.pieces import BLANKS, Piece, add_piece

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_LONGEST_ESCAPE = len(r"\ud83d\ude00")

_NeedsText = Iterator[None]
"""A reader of a part of the JSON, which yields where it needs more text."""


class _Unexpected(Exception):
    """The text is no list of calls."""


class RequiredCallParser:
    """Reads `[{"name": ..., "arguments": {...}}, ...]`, with any blanks between JSON's tokens.

    Sends a name once it is complete, and arguments as they arrive. If the text is no list of calls,
    its unsent part and the rest become content.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._held_text = ""
        """Text that is not read yet."""
        self._unsent: list[str] = []
        """Text that was read since the last delta."""
        self._is_incomplete = True
        """Whether the text so far ends within a call."""
        self._is_text = False
        self._pieces: list[Piece] = []
        self._reader = self._read_calls()

    def push(self, text: str) -> list[Piece]:
        """The pieces that `text` completes."""
        self._pieces = []
        self._held_text += text
        if not self._is_text:
            try:
                next(self._reader)
            except _Unexpected:
                self._give_up()
        elif self._held_text:
            add_piece(self._pieces, self._held_text)
            self._held_text = ""
        return self._pieces

    def flush(self) -> list[Piece]:
        """The pieces left at the end of the text: half a call is text, unless a call was sent."""
        self._pieces = []
        if self._calls.num_begun:
            self._unsent, self._held_text = [], ""
        has_begun = bool(self._unsent or self._held_text or self._calls.num_begun)
        if self._is_incomplete and has_begun and not self._is_text:
            self._give_up()
        return self._pieces

    def _give_up(self) -> None:
        self._is_text = True
        self._calls.num_broken += 1
        text = "".join(self._unsent) + self._held_text
        self._unsent, self._held_text = [], ""
        if text:
            add_piece(self._pieces, text)

    # ---- the JSON --------------------------------------------------------------------

    def _read_calls(self) -> _NeedsText:
        yield from self._read("[")
        separator = ","
        while separator == ",":
            yield from self._read_call()
            if self._calls.is_full:
                break
            yield from self._skip_blanks()
            separator = self._take(1)
            if separator == ",":
                yield from self._skip_blanks()
            self._unsent.clear()
        if separator not in ",]":
            self._held_text = separator + self._held_text
            raise _Unexpected
        while self._calls.is_full or not self._held_text.strip(BLANKS):
            self._held_text = ""
            yield
        raise _Unexpected

    def _read_call(self) -> _NeedsText:
        yield from self._read("{")
        self._is_incomplete = True
        yield from self._read('"name"', ":")
        yield from self._read_name()
        yield from self._read(",", '"arguments"', ":")
        yield from self._skip_blanks()
        yield from self._read_arguments()
        self._calls.num_valid += 1
        self._is_incomplete = False
        if not self._calls.is_full:
            yield from self._read("}")

    def _read(self, *tokens: str) -> _NeedsText:
        for token in tokens:
            yield from self._skip_blanks()
            while len(self._held_text) < len(token) and token.startswith(self._held_text):
                yield
            if not self._held_text.startswith(token):
                raise _Unexpected
            self._take(len(token))

    def _read_name(self) -> _NeedsText:
        yield from self._skip_blanks()
        while (match := _STRING.match(self._held_text)) is None:
            if self._held_text[0] != '"' or len(self._held_text) > self._longest_name:
                raise _Unexpected
            yield
        try:
            name = json.loads(match[0])
        except ValueError:
            raise _Unexpected from None
        if not self._calls.may_call(name):
            raise _Unexpected
        self._take(match.end())
        self._unsent.clear()
        self._pieces.append(self._calls.begin(name))

    def _read_arguments(self) -> _NeedsText:
        if self._held_text[0] != "{":
            raise _Unexpected
        self._unsent.clear()
        body = JsonBody(ends_with_value=True)
        while True:
            arguments = self._held_text[: body.push(self._held_text)]
            self._held_text = self._held_text[len(arguments) :]
            if arguments:
                self._pieces.append(self._calls.append_arguments(arguments))
            if body.is_closed:
                return
            yield

    def _skip_blanks(self) -> _NeedsText:
        while not (bare := self._held_text.lstrip(BLANKS)):
            self._take(len(self._held_text))
            yield
        self._take(len(self._held_text) - len(bare))

    def _take(self, length: int) -> str:
        text, self._held_text = self._held_text[:length], self._held_text[length:]
        self._unsent.append(text)
        return text

    @property
    def _longest_name(self) -> int:
        """The maximum length of a tool's name in JSON."""
        return 2 + _LONGEST_ESCAPE * self._calls.longest_name
