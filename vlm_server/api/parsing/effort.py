"""Reasoning before the answer: whether and how much, from the fields of any dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EFFORT_TOKENS: Mapping[str, int] = {"minimal": 512, "low": 1024, "medium": 4096}
"""The most reasoning tokens of an effort; other efforts have no bound."""
NO_EFFORT = "none"
MODES: Mapping[str, bool | None] = {
    "enabled": True,
    "disabled": False,
    "auto": None,
    "adaptive": None,
}
"""By `thinking.type`, whether to reason; None leaves it to the model's template."""


def longest_thought(effort: str | None, *said: int | None) -> int | None:
    """The most reasoning tokens: the least of `said`, else that of `effort`; None is no bound.

    With 0, reasoning ends where it begins.
    """
    shortest = min((each for each in said if each is not None), default=None)
    return EFFORT_TOKENS.get(effort or "") if shortest is None else shortest


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Template variables for templates that know levels of effort."""
    return {} if effort in (None, NO_EFFORT) else {"reasoning_effort": effort}


def variables_text(effort: str | None) -> str:
    """`effort_variables`, as JSON."""
    return json.dumps(effort_variables(effort), separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class ThinkingOptions:
    """The wanted reasoning, in dialects with a mode (`thinking.type`) and an effort.

    An effort enables reasoning, unless the mode says otherwise.
    """

    mode: str | None = None
    effort: str | None = None
    budget: int | None = None

    @property
    def enables(self) -> bool | None:
        """Whether to reason; None leaves it to the template."""
        wanted = None if self.mode is None else MODES[self.mode]
        if wanted is None and self.effort is not None:
            return self.effort != NO_EFFORT
        return wanted

    @property
    def max_tokens(self) -> int | None:
        """The most reasoning tokens: see `longest_thought`."""
        return longest_thought(self.effort, self.budget)

    @property
    def variables(self) -> str:
        """The template variables, as JSON."""
        return variables_text(self.effort)
