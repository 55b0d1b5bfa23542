"""The tool calls of one choice: allowed names, counts and ids."""

from __future__ import annotations

import secrets
import string

from vlm_server.engine.output.formats import ToolFormat
from vlm_server.interfaces import AnswerFormat
from vlm_server.protocol import ToolCallDelta

_ALPHANUMERICS = string.ascii_letters + string.digits


class Calls:
    """Counts the calls of one choice, and numbers them."""

    def __init__(self, answer: AnswerFormat, tools: ToolFormat | None) -> None:
        self.num_begun = 0
        self.num_valid = 0
        """The number of complete calls."""
        self.num_broken = 0
        """The number of calls that became text, or were cut off."""
        self._names = frozenset(_name_of(dict(tool)) for tool in answer.tools)
        self._parallel = answer.parallel
        # The chat templates of Mistral refuse other ids.
        self._prefix, self._length = ("", 9) if tools and tools.name == "mistral" else ("call_", 24)

    @property
    def is_full(self) -> bool:
        """Whether no more calls may follow."""
        return not self._parallel and self.num_valid > 0

    @property
    def longest_name(self) -> int:
        return max(map(len, self._names), default=0)

    def may_call(self, name: str) -> bool:
        return name in self._names

    def begin(self, name: str) -> ToolCallDelta:
        """Begin another call; returns its first delta."""
        call_id = self._prefix + "".join(
            secrets.choice(_ALPHANUMERICS) for _ in range(self._length)
        )
        self.num_begun += 1
        return ToolCallDelta(self.num_begun - 1, call_id, name)

    def append_arguments(self, arguments: str) -> ToolCallDelta:
        """A delta that appends `arguments` to the last call."""
        return ToolCallDelta(self.num_begun - 1, arguments=arguments)


def _name_of(tool: dict[str, object]) -> str:
    function = tool.get("function", tool)
    return str(function["name"]) if isinstance(function, dict) else ""
