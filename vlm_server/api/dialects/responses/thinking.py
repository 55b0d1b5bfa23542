"""Whether the model shall think before it answers, and for how long: `reasoning` and `thinking`."""

from __future__ import annotations

from vlm_server.api.dialects.responses.schema import ResponsesRequest
from vlm_server.api.parsing.effort import (
    MODES,
    NO_EFFORT,
    longest_thought,
    variables_text,
)
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import TemplateOptions


def template_options(request: ResponsesRequest, *, continue_final: bool) -> TemplateOptions:
    """Raises InvalidRequest if the fields contradict each other."""
    variables = variables_text(_effort(request))
    return TemplateOptions(_is_enabled(request), variables, continue_final)


def max_reasoning_tokens(request: ResponsesRequest) -> int | None:
    """The longest thought: see `longest_thought`."""
    return longest_thought(
        _effort(request),
        request.reasoning.max_tokens if request.reasoning else None,
        request.thinking.budget_tokens if request.thinking else None,
    )


def _effort(request: ResponsesRequest) -> str | None:
    return request.reasoning.effort if request.reasoning else None


def _is_enabled(request: ResponsesRequest) -> bool | None:
    """None if nothing is said."""
    effort = _effort(request)
    by_effort = None if effort is None else effort != NO_EFFORT
    by_mode = MODES[request.thinking.type or "auto"] if request.thinking else None
    if by_effort is None or by_mode is None or by_effort is by_mode:
        return by_mode if by_effort is None else by_effort
    raise InvalidRequest(
        "`reasoning.effort` and `thinking` contradict each other.", "reasoning.effort"
    )
