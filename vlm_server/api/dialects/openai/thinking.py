"""Whether the model shall think before it answers, and for how long.

Clients say it in OpenAI's field (`reasoning_effort`), vLLM's (`chat_template_kwargs`), Anthropic's
(`thinking`) or OpenRouter's (`reasoning`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from vlm_server.api.parsing.effort import (
    MODES,
    NO_EFFORT,
    effort_variables,
    longest_thought,
)
from vlm_server.api.parsing.json_schema import json_text
from vlm_server.errors import InvalidRequest, UnsupportedField
from vlm_server.protocol import TemplateOptions

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, Meta(ge=0, le=2**31 - 1)]

MAX_VARIABLES_BYTES = 16 << 10
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
    }
)
"""What a template is given of the request's other fields, or not at all."""


class Thinking(Struct, forbid_unknown_fields=True):
    """`auto` and `adaptive` leave it to the template."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]
    budget_tokens: Budget | None = None


class Reasoning(Struct, forbid_unknown_fields=True):
    effort: Effort | None = None
    max_tokens: Budget | None = None
    enabled: bool | None = None


@dataclass(frozen=True, slots=True)
class ThinkingFields:
    """The fields of a request that are about thinking."""

    effort: Effort | None
    thinking: Thinking | None
    reasoning: Reasoning | None
    template_kwargs: dict[str, Any] | None

    def template_options(self, *, continue_final: bool) -> TemplateOptions:
        """Raises InvalidRequest if the fields contradict each other, or can't be had."""
        variables = dict(self.template_kwargs or {})
        if reserved := RESERVED & variables.keys():
            param = f"chat_template_kwargs.{min(reserved)}"
            raise UnsupportedField(f"`{param}` can't be set; leave it out.", param)
        enabled = self._is_enabled()
        variables.pop("enable_thinking", None)
        variables = effort_variables(self._effort) | variables
        text = json_text(
            variables, "chat_template_kwargs", MAX_VARIABLES_BYTES, "template variables"
        )
        return TemplateOptions(enabled, text, continue_final)

    def max_tokens(self) -> int | None:
        """The longest thought: what is said in tokens, else what goes with the effort."""
        return longest_thought(
            self._effort,
            self.thinking.budget_tokens if self.thinking else None,
            self.reasoning.max_tokens if self.reasoning else None,
        )

    @property
    def _effort(self) -> Effort | None:
        return self.effort or (self.reasoning.effort if self.reasoning else None)

    def _is_enabled(self) -> bool | None:
        """None if nothing is said. Raises InvalidRequest for a contradiction."""
        said = dict(self._wishes())
        if len(set(said.values())) > 1:
            names = " and ".join(f"`{name}`" for name in said)
            raise InvalidRequest(f"{names} contradict each other.", next(iter(said)))
        return next(iter(said.values()), None)

    def _wishes(self) -> Iterator[tuple[str, bool]]:
        """The fields that say whether to think."""
        if self.effort is not None:
            yield "reasoning_effort", self.effort != NO_EFFORT
        if self.thinking is not None and (mode := MODES[self.thinking.type]) is not None:
            yield "thinking", mode
        if self.reasoning is not None:
            if self.reasoning.effort is not None:
                yield "reasoning.effort", self.reasoning.effort != NO_EFFORT
            if self.reasoning.enabled is not None:
                yield "reasoning.enabled", self.reasoning.enabled
        wanted = (self.template_kwargs or {}).get("enable_thinking")
        if wanted is not None:
            param = "chat_template_kwargs.enable_thinking"
            if not isinstance(wanted, bool):
                raise InvalidRequest(f"`{param}` must be `true` or `false`.", param)
            yield param, wanted
