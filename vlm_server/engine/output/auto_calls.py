"""Tool calls under `tool_choice: auto`, which a model writes between its own format's marks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vlm_server.engine.output.calls import Calls
from vlm_server.engine.output.formats import ToolFormat
from vlm_server.engine.output.pieces import BLANKS, Marks, marks
from vlm_server.protocol import ToolCallDelta

_IN_STRING = re.compile(r'[\x00-\x1f"\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')


class AutoCallParser:
    """Collects the text between the marks, and parses it once it is complete.

    In a format without an end mark, a call ends with its JSON, or before the next line or start
    mark if its JSON has not begun. A mark in an argument is text. If an end mark was taken for such
    text, and a start mark follows before the call is complete, the call is broken, and another one
    begins.
    """

    def __init__(
        self, tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]], calls: Calls
    ) -> None:
        self.start = tool_format.start
        self.starts = (tool_format.start, *tool_format.further_starts)
        """Marks that begin a call where a message begins; `start` does so everywhere."""
        self.has_end_mark = bool(tool_format.end)
        self._format = tool_format
        self._tools = tools
        self._calls = calls
        self.begin(self.start)

    def begin(self, start: str) -> None:
        """Begin a call after the mark `start`."""
        end = self._format.end
        self._start = start
        self._parts: list[str] = []
        self.ends: Marks = marks(*([end] if end else ["\n", self.start]))
        """Marks that may end the call."""
        self._body: JsonBody | BracketBody | None = None
        if self._format.is_json:
            self._body = JsonBody(ends_with_value=not end)
        elif self._format.brackets:
            self._body = BracketBody(*self._format.brackets)

    @property
    def is_closed(self) -> bool:
        """Whether the call is complete without an end mark."""
        return isinstance(self._body, JsonBody) and self._body.is_closed

    def push(self, text: str) -> int:
        """Append text after the start mark; returns the number of its characters in the call."""
        length = len(text)
        match self._body:
            case JsonBody() as body:
                length = body.push(text)
            case BracketBody() as body:
                body.push(text)
        self._parts.append(text[:length])
        return length

    def is_text(self, mark: str) -> bool:
        """Whether `mark`, one of `ends` after the pushed text, is text of an argument."""
        match self._body:
            case JsonBody() as body if body.is_inside_string:
                is_text = mark != "\n"
            case JsonBody() as body:
                is_text = mark == "\n" and body.is_begun and not body.is_broken
            case BracketBody() as body:
                is_text = mark == self._format.end and body.is_incomplete()
            case _:
                is_text = False
        if is_text and mark == self._format.end:
            self.ends = marks(mark, self.start)
        return is_text

    def end(self, end_mark: str, *, is_cut_off: bool = False) -> Sequence[ToolCallDelta] | str:
        """The collected calls; the generated text if they are invalid."""
        body, start = "".join(self._parts), self._start
        self.begin(self.start)
        calls = [] if is_cut_off else self._read(body)
        if not calls:
            self._calls.num_broken += 1
            return start + body + end_mark
        deltas = []
        for name, arguments in calls:
            if not self._calls.is_full:
                deltas += [self._calls.begin(name), self._calls.append_arguments(arguments)]
                self._calls.num_valid += 1
        return deltas

    def _read(self, body: str) -> Sequence[tuple[str, str]]:
        """Names and arguments of the calls; empty if any is invalid."""
        try:
            calls = list(self._format.parse(body, self._tools))
            are_valid = all(map(self._is_valid, calls))
        except Exception:  # noqa: BLE001 - parsers raise almost anything on broken calls
            return []
        return calls if are_valid else []

    def _is_valid(self, call: tuple[str, str]) -> bool:
        """Whether a call is valid; may also raise an error if its arguments are no JSON."""
        name, arguments = call
        return self._calls.may_call(name) and isinstance(msgspec.json.decode(arguments), dict)


class JsonBody:
    """The state of a JSON value, with any text before it, that arrives in pieces.

    A line break within a string shows that the text is no JSON (`is_broken`); from there on strings
    are not recognized. With `ends_with_value` the body ends with the value.
    """

    def __init__(self, *, ends_with_value: bool) -> None:
        self.is_begun = False
        """Whether an object has begun, or a list at the very beginning."""
        self.is_closed = False
        """Whether the body has ended with its value."""
        self.is_broken = False
        self.is_inside_string = False
        self._ends_with_value = ends_with_value
        self._is_at_start = True
        self._depth = 0
        self._is_escaped = False

    def push(self, text: str) -> int:
        """The number of characters of `text` that belong to the body."""
        if self.is_broken:
            return len(text)
        at = 0
        while not (self.is_closed or self.is_broken) and at < len(text):
            if self._is_escaped:
                at, self._is_escaped = at + 1, False
                continue
            match = (_IN_STRING if self.is_inside_string else _OUTSIDE).search(text, at)
            text_before = text[at : match.start()] if match else text[at:]
            self._is_at_start = self._is_at_start and not text_before.strip(BLANKS)
            at = match.end() if match else len(text)
            if match:
                self._take(match[0])
        return len(text) if self.is_broken else at

    def _take(self, character: str) -> None:
        if self.is_inside_string:
            self._is_escaped = self.is_inside_string = character == "\\"
            self.is_broken = character not in '"\\'
        elif character == '"':
            self.is_inside_string = self.is_begun and self._depth > 0
        elif character == "{" or (character == "[" and (self.is_begun or self._is_at_start)):
            self._depth += 1
            self.is_begun = True
        elif character in "}]" and self.is_begun:
            self._depth = max(self._depth - 1, 0)
            self.is_closed = self._ends_with_value and not self._depth
        self._is_at_start = False


class BracketBody:
    """The state of a text that, once it has an opening bracket, must end after a closing one."""

    def __init__(self, opening: str, *closing: str) -> None:
        self._opening, self._closing = opening, closing
        self._longest = max(map(len, closing))
        self._unsearched: list[str] = []
        self._is_open = False
        """Whether the searched text has an opening bracket."""
        self._tail = ""
        """The end of the text, with trailing blanks reduced to one."""

    def push(self, text: str) -> None:
        if not self._is_open:
            self._unsearched.append(text)
        tail = self._tail + text
        bare = tail.rstrip(BLANKS)
        self._tail = bare[-self._longest :] + tail[len(bare) :][:1]

    def is_incomplete(self) -> bool:
        """Whether the text can't end here; called at each mark that may end it."""
        if not self._is_open:
            self._is_open = self._opening in "".join(self._unsearched)
            self._unsearched.clear()
        return self._is_open and not self._tail.rstrip(BLANKS).endswith(self._closing)
