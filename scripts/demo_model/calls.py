"""How the chat template writes tools, calls and results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

Arguments = dict[str, str | int]
RESULT_BEGIN, RESULT_END = "<tool_response>\n", "\n</tool_response>"


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    name: str
    arguments: Arguments

    @property
    def text(self) -> str:
        """Written freely."""
        call = f'{{"name": "{self.name}", "arguments": {self.arguments_text}}}'
        return f"<tool_call>\n{call}\n</tool_call>"

    @property
    def forced_text(self) -> str:
        """Held to a list by a grammar, for a client that forces a call."""
        return f'[{{"name": "{self.name}", "arguments": {self.arguments_text}}}]'

    @property
    def arguments_text(self) -> str:
        """JSON, as a client gets it that asks for the arguments alone by a schema."""
        return json.dumps(self.arguments)


def result_text(content: str) -> str:
    """The result of a call."""
    return RESULT_BEGIN + content + RESULT_END


def system_text(system: str | None, tools: Sequence[Tool]) -> str | None:
    """The system message; None if there is none."""
    if not tools:
        return system
    lead = "" if system is None else f"{system}\n"
    lines = (f"{tool.name}({', '.join(tool.parameters)})\n" for tool in tools)
    return f"{lead}Tools:\n{''.join(lines)}"
