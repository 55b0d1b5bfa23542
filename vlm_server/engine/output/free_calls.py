"""Calls that the model is free to make, between the marks of its own format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vlm_server.engine.output.call_body import BracketBody, JsonBody
from vlm_server.engine.output.calls import Calls
from vlm_server.engine.output.marks import Marks, marks
from vlm_server.engine.output.tool_formats import ToolFormat
from vlm_server.protocol import ToolCallDelta


class FreeCalls:
    """Collects what stands between the marks, and reads it once it is complete.

    Calls whose format has no end mark end with their JSON, or before the next line or start mark if
    there is none yet. A mark in an argument is its text. If an end mark was taken for that, and
    there is a start mark before the call is complete, it is broken, and another one begins.
    """

    def __init__(
        self, tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]], calls: Calls
    ) -> None:
        self.start = tool_format.start
        self.has_end_mark = bool(tool_format.end)
        self._format = tool_format
        self._parse = tool_format.parse
        self._tools = tools
        self._calls = calls
        self._begin()

    def _begin(self) -> None:
        end = self._format.end
        self._parts: list[str] = []
        self.ends: Marks = marks(*([end] if end else ["\n", self.start]))
        """What may end the call."""
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
        """More text behind the start mark; how many characters of it belong to the call."""
        length = len(text)
        match self._body:
            case JsonBody() as body:
                length = body.push(text)
            case BracketBody() as body:
                body.push(text)
        self._parts.append(text[:length])
        return length

    def is_text(self, mark: str) -> bool:
        """Whether `mark`, one of `ends` that follows what was pushed, is text of an argument."""
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
        """The calls that were collected; or all that was generated, if it is no valid call."""
        body = "".join(self._parts)
        self._begin()
        read = [] if is_cut_off else self._read(body)
        if not read:
            self._calls.num_broken += 1
            return self.start + body + end_mark
        deltas = []
        for name, arguments in read:
            if not self._calls.is_full:
                deltas += [self._calls.begin(name), self._calls.go_on(arguments)]
                self._calls.num_valid += 1
        return deltas

    def _read(self, body: str) -> Sequence[tuple[str, str]]:
        """Names and arguments; none if one of the calls is not valid."""
        try:
            read = list(self._parse(body, self._tools))
            are_valid = all(map(self._is_valid, read))
        except Exception:  # noqa: BLE001 - parsers raise almost anything on broken calls
            return []
        return read if are_valid else []

    def _is_valid(self, call: tuple[str, str]) -> bool:
        """Raises if the arguments are no JSON, or the like."""
        name, arguments = call
        return self._calls.may_call(name) and isinstance(msgspec.json.decode(arguments), dict)
