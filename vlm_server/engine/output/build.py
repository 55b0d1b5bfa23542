"""Which parser an answer needs, if any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from vlm_server.engine.output.answer_parser import AnswerParser
from vlm_server.engine.output.calls import Calls
from vlm_server.engine.output.forced_calls import ForcedCalls
from vlm_server.engine.output.free_calls import FreeCalls
from vlm_server.engine.output.tool_formats import ToolFormat, tool_format
from vlm_server.interfaces import AnswerFormat
from vlm_server.interfaces.model_spec import ModelSpec, ReasoningFormat


@dataclass(frozen=True, slots=True)
class Formats:
    """How a model writes tool calls and thoughts; None if it has no way of its own."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @classmethod
    def of(cls, host: ModelSpec) -> Self:
        return cls(tool_format(host.tool_parser), host.reasoning_format)


NO_FORMATS = Formats()


def build_parser(
    formats: Formats, answer: AnswerFormat | None, *, is_json: bool
) -> AnswerParser | None:
    """A parser for one answer; None if all of its text is content.

    `is_json`: content, if there is any, is JSON that a grammar ensures. What looks like a mark in
    it is none.
    """
    if answer is None:
        return None
    may_call = bool(answer.tools) and formats.tools is not None
    if not (may_call or answer.is_forced or formats.reasoning):
        return None
    calls = Calls(answer, formats.tools)
    free = None
    if formats.tools is not None and may_call and not answer.is_forced:
        free = FreeCalls(formats.tools, answer.tools, calls)
    return AnswerParser(
        calls,
        free,
        ForcedCalls(calls) if answer.is_forced else None,
        formats.reasoning,
        starts_in_thought=answer.starts_in_thought,
        content_has_marks=not (is_json or answer.is_forced),
    )
