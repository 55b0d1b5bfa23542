"""What an answer must follow, and how the runner follows it token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import RequestError


class AnswerMatcher(Protocol):
    """Follows one answer, token by token; another process works out what may come next."""

    @property
    def fault(self) -> RequestError | None:
        """Why the answer can't go on; None if it can."""
        ...

    @property
    def can_look_ahead(self) -> bool:
        """Whether `look_ahead` may tell anything where the answer is now."""
        ...

    @property
    def forced(self) -> Sequence[int]:
        """Tokens that the grammar leaves no choice but to spell, as far as it knows by now."""
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """These were drawn, one after another. Returns at once."""
        ...

    def look_ahead(self, token_ids: Sequence[int]) -> None:
        """Ask what may follow each of these, if they were drawn next. Returns at once."""
        ...

    def ahead(self) -> Sequence[NDArray[np.bool_]]:
        """The answer to `look_ahead`, once `wait` says so: (vocabulary,) after each token.

        Shorter if a token may not come, or nobody can tell. Empty once more was drawn.
        """
        ...

    def wait(self, seconds: float) -> bool:
        """Whether `allowed` and `ahead` are known, waiting for them no longer than this."""
        ...

    def allowed(self) -> NDArray[np.bool_]:
        """(vocabulary,): which tokens may come next; none if the answer can't go on."""
        ...

    def yield_to_others(self) -> None:
        """It was waited for: let its work not slow down what others do."""
        ...

    def close(self) -> None:
        """The answer has ended. Closing twice is no error."""
        ...


class Grammar(Protocol):
    """What an answer must follow. It never changes: answers begin on any thread."""

    def begin(self, count: int) -> Sequence[AnswerMatcher]:
        """Matchers at the beginning of so many answers of one request. Returns at once."""
        ...
