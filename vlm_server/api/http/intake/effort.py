"""How much a model shall think, in the words that most clients have for it."""

from __future__ import annotations

from collections.abc import Mapping

EFFORT_TOKENS: Mapping[str, int] = {"minimal": 512, "low": 1024, "medium": 4096}
"""The longest thought of an effort; others have no bound."""


def longest_thought(effort: str | None, *said: int | None) -> int | None:
    """In tokens: the least of what is `said`, else what goes with `effort`; None is no bound."""
    shortest = min((each for each in said if each is not None), default=None)
    return EFFORT_TOKENS.get(effort or "") if shortest is None else shortest
