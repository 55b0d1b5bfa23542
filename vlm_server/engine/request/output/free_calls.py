"""Calls that the model is free to make, between the marks of its own format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from vlm_server.engine.request.output.calls import Calls
from vlm_server.engine.request.output.marks import Marks, marks
from vlm_server.host_model import ToolFormat
from vlm_server.protocol import ToolCallDelta


class FreeCalls:
    """Collects what stands between the marks, and reads it once it is complete.

    Calls whose format has no end mark end before the next line, or before the next start mark.
    """

    def __init__(
        self, tool_format: ToolFormat, tools: Sequence[Mapping[str, Any]], calls: Calls
    ) -> None:
        self.start = tool_format.start
        self.has_end_mark = bool(tool_format.end)
        self.ends: Marks = marks(*([tool_format.end] if tool_format.end else ["\n", self.start]))
        """What ends a call."""
        self._parse = tool_format.parse
        self._tools = tools
        self._calls = calls
        self._parts: list[str] = []

    def push(self, text: str) -> None:
        """More text between the marks."""
        self._parts.append(text)

    def end(self, end_mark: str, *, is_cut_off: bool = False) -> Sequence[ToolCallDelta] | str:
        """The calls that were collected; or all that was generated, if it is no valid call."""
        body, self._parts = "".join(self._parts), []
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
