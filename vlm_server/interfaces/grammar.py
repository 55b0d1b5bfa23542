"""Grammars of answers, and their matchers, which the runner advances token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import RequestError


class AnswerMatcher(Protocol):
    """A matcher of one answer's tokens; another process computes the masks."""

    @property
    def error(self) -> RequestError | None:
        """The error that ends the answer; None if it can continue."""

    @property
    def can_look_ahead(self) -> bool:
        """Whether `look_ahead` has an effect at the present point of the answer."""

    @property
    def forced(self) -> Sequence[int]:
        """Tokens that the grammar forces next, as far as known."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append sampled tokens. Returns immediately."""

    def look_ahead(self, token_ids: Sequence[int]) -> None:
        """Request the masks after each of these draft tokens. Returns immediately."""

    def draft_masks(self) -> Sequence[NDArray[np.bool_]]:
        """The masks that `look_ahead` requested, valid after `wait` has returned true.

        (vocabulary,) bool after each draft token, up to one that is not allowed or unknown. Empty
        after the next `advance`.
        """

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for `allowed` and `draft_masks`; whether they are known."""

    def allowed(self) -> NDArray[np.bool_]:
        """(vocabulary,) bool: the allowed next tokens; none if the answer can't continue."""

    def lower_priority(self) -> None:
        """Compute masks at a lower priority from now on: the last one was late."""

    def close(self) -> None:
        """Release the matcher. Closing twice is no error."""


class Grammar(Protocol):
    """A constraint on answers. Immutable; answers may begin on any thread."""

    def begin(self, count: int) -> Sequence[AnswerMatcher]:
        """Matchers for `count` answers of one request. Returns immediately."""
