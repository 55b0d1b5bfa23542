"""The reasoning of an answer, whether and how long: one rule for all dialects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vlm_server.api.parsing.json_schema import json_text
from vlm_server.errors import InvalidRequest, UnsupportedField
from vlm_server.protocol import TemplateOptions

EFFORT_TOKENS: Mapping[str, int] = {"minimal": 512, "low": 1024, "medium": 4096}
"""The bound on reasoning of an effort, in tokens; other efforts have none."""
MODES: Mapping[str | None, bool | None] = {
    "enabled": True,
    "disabled": False,
    "auto": None,
    "adaptive": None,
    None: None,
}
"""Whether to reason, by `thinking.type`; None leaves it to the model's template."""

MAX_VARIABLES_BYTES = 16 << 10
RESERVED = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("chat_template", "tokenize"),
    }
)
"""Template variables that clients can't set directly."""


def asks_effort(effort: str | None) -> bool | None:
    """Whether an effort asks for reasoning; None without an effort."""
    return None if effort is None else effort != "none"


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """A request's fields about reasoning.

    wishes: whether to reason, by field; None if the field says nothing. budgets: the longest
    reasoning, in tokens. variables: the client's template variables.
    """

    wishes: Mapping[str, bool | None]
    effort: str | None = None
    budgets: tuple[int | None, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def max_tokens(self) -> int | None:
        """The smallest budget, else the bound of the effort; None without a bound.

        With 0 reasoning ends where it begins.
        """
        budgets = [budget for budget in self.budgets if budget is not None]
        return min(budgets) if budgets else EFFORT_TOKENS.get(self.effort or "")

    def template_options(self, *, continue_final: bool) -> TemplateOptions:
        """The template's options. Raises InvalidRequest for contradictory or reserved fields."""
        if reserved := RESERVED & self.variables.keys():
            param = f"chat_template_kwargs.{min(reserved)}"
            raise UnsupportedField(f"`{param}` can't be set; leave it out.", param)
        wishes = {name: wish for name, wish in self.wishes.items() if wish is not None}
        if len(set(wishes.values())) > 1:
            names = " and ".join(f"`{name}`" for name in wishes)
            raise InvalidRequest(f"{names} contradict each other.", next(iter(wishes)))
        level = {"reasoning_effort": self.effort} if asks_effort(self.effort) else {}
        text = json_text(
            {**level, **self.variables},
            "chat_template_kwargs",
            MAX_VARIABLES_BYTES,
            "template variables",
        )
        return TemplateOptions(next(iter(wishes.values()), None), text, continue_final)
