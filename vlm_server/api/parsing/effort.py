"""Whether a model shall think before it answers, and how much: one reading for all dialects.

Their words for it are their own; what they mean, and what excludes what, is said here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EFFORT_TOKENS: Mapping[str, int] = {"minimal": 512, "low": 1024, "medium": 4096}
"""The longest thought of an effort; others have no bound."""
NO_EFFORT = "none"
MODES: Mapping[str, bool | None] = {
    "enabled": True,
    "disabled": False,
    "auto": None,
    "adaptive": None,
}
"""What `thinking.type` asks for; None leaves it to the model's template."""


def longest_thought(effort: str | None, *said: int | None) -> int | None:
    """In tokens: the least of what is `said`, else what goes with `effort`; None is no bound.

    With 0 a thought ends where it begins.
    """
    shortest = min((each for each in said if each is not None), default=None)
    return EFFORT_TOKENS.get(effort or "") if shortest is None else shortest


def effort_variables(effort: str | None) -> dict[str, Any]:
    """What templates that know levels of effort are given."""
    return {} if effort in (None, NO_EFFORT) else {"reasoning_effort": effort}


def variables_text(effort: str | None) -> str:
    """`effort_variables`, as JSON."""
    return json.dumps(effort_variables(effort), separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class ThinkingOptions:
    """What a request wants, in dialects with a mode (`thinking.type`) and an effort.

    An effort asks for thoughts, unless the mode says otherwise.
    """

    mode: str | None = None
    effort: str | None = None
    budget: int | None = None

    @property
    def enables(self) -> bool | None:
        """Whether to think; None leaves it to the template."""
        wanted = None if self.mode is None else MODES[self.mode]
        if wanted is None and self.effort is not None:
            return self.effort != NO_EFFORT
        return wanted

    @property
    def max_tokens(self) -> int | None:
        """The longest thought: see `longest_thought`."""
        return longest_thought(self.effort, self.budget)

    @property
    def variables(self) -> str:
        """The template variables, as JSON."""
        return variables_text(self.effort)
