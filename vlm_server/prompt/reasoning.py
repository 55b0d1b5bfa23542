"""Reasoning before an answer: a grammar begins after it, and a budget ends it.

Reasoning ends where its text has the end mark, however that is split into tokens, since the answer
is read as text. The grammar's process has no part in it: nearly every token is allowed.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import RequestError
from vlm_server.interfaces import AnswerMatcher, Grammar
from vlm_server.prompt.reasoning_marks import ReasoningMarks
from vlm_server.protocol import Submit


class ReasoningGrammar:
    """The `Grammar` of an answer that may begin with reasoning, and then follows `inner`, if any.

    budget: the most tokens of reasoning; None is no bound. starts: whether the prompt ends inside
    reasoning. may_begin: whether the answer may begin with it.
    """

    def __init__(
        self,
        marks: ReasoningMarks,
        inner: Grammar | None,
        budget: int | None,
        *,
        starts: bool,
        may_begin: bool,
    ) -> None:
        self._marks = marks
        self._inner = inner
        self._budget = budget
        self._starts = starts
        self._may_begin = may_begin

    def begin(self, count: int) -> Sequence[AnswerMatcher]:
        """Matchers at the beginning of `count` answers of one request. Returns at once."""
        inner: Sequence[AnswerMatcher | None] = [None] * count
        if self._inner is not None:
            inner = self._inner.begin(count)
        return [
            ReasoningMatcher(
                self._marks, each, self._budget, starts=self._starts, may_begin=self._may_begin
            )
            for each in inner
        ]


def with_reasoning(
    marks: ReasoningMarks | None, grammar: Grammar | None, submit: Submit, *, starts: bool
) -> Grammar | None:
    """`grammar` after reasoning within its budget, for a model with these `marks`.

    starts: whether the prompt ends inside reasoning.
    """
    budget = submit.sampling.max_reasoning_tokens
    is_asked = submit.template.enable_thinking is True and budget != 0
    may_begin = grammar is None or is_asked
    if marks is None or (budget is None and (grammar is None or not (starts or may_begin))):
        return grammar
    return ReasoningGrammar(marks, grammar, budget, starts=starts, may_begin=may_begin)


class _State(enum.Enum):
    BEFORE = enum.auto()
    """All tokens so far may begin a start mark."""
    STARTING = enum.auto()
    """The rest of the start mark is forced."""
    INSIDE = enum.auto()
    CLOSING = enum.auto()
    """The end mark is forced, or the blanks after it."""
    AFTER = enum.auto()
    """Tokens belong to the answer, and to its grammar if there is one."""


class ReasoningMatcher:
    """Follows one answer: see `ReasoningGrammar`."""

    def __init__(
        self,
        marks: ReasoningMarks,
        inner: AnswerMatcher | None,
        budget: int | None,
        *,
        starts: bool,
        may_begin: bool,
    ) -> None:
        self._marks = marks
        self._inner = inner
        self._budget = budget
        self._forced: list[int] = []
        """The next tokens, where there is no choice."""
        self._recent: list[int] = []
        """The last sampled tokens, which may be part of a mark."""
        self._num_inside = 0
        self._state = _State.BEFORE
        self._first: NDArray[np.bool_] | None = None
        if starts:
            self._enter()
        elif not may_begin or not marks.start_ids:
            self._state = _State.AFTER
        elif inner is not None:
            self._first = marks.with_start(inner.allowed())

    @property
    def fault(self) -> RequestError | None:
        return self._inner.fault if self._inner is not None else None

    @property
    def can_look_ahead(self) -> bool:
        """Whether the answer has begun, and follows a grammar."""
        return self._state is _State.AFTER and self._inner is not None

    @property
    def forced(self) -> Sequence[int]:
        """Tokens that the grammar forces next; none inside reasoning."""
        return self._inner.forced if self._inner is not None and self.can_look_ahead else ()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append sampled tokens. Returns at once."""
        for i, token_id in enumerate(token_ids):
            match self._state:
                case _State.AFTER:
                    self._advance_inner(token_ids[i:])
                    return
                case _State.BEFORE if self._inner is not None:
                    self._choose(self._inner, token_id)
                case _State.BEFORE:
                    self._look_for_start(token_id)
                case _State.INSIDE:
                    self._record_inside(token_id)
                case _State.STARTING | _State.CLOSING:
                    self._go_on()

    def look_ahead(self, token_ids: Sequence[int]) -> None:
        """Request the masks after draft tokens; ignored inside reasoning."""
        if self._inner is not None and self.can_look_ahead:
            self._inner.look_ahead(token_ids)

    def ahead(self) -> Sequence[NDArray[np.bool_]]:
        """See `AnswerMatcher`."""
        return self._inner.ahead() if self._inner is not None and self.can_look_ahead else ()

    def wait(self, seconds: float) -> bool:
        """Whether `allowed` is known within `seconds`; inside reasoning it always is."""
        return self._inner is None or self._state is not _State.AFTER or self._inner.wait(seconds)

    def allowed(self) -> NDArray[np.bool_]:
        """(vocabulary,) bool: allowed next tokens. Equal masks are mostly the same array."""
        if self._forced:
            return self._marks.only(self._forced[0])
        if self._state is _State.AFTER and self._inner is not None:
            return self._inner.allowed()
        if self._inner is None:
            return self._marks.everything
        if self._state is _State.INSIDE:
            return self._marks.inside(self._recent)
        assert self._first is not None
        return self._first

    def yield_to_others(self) -> None:
        """See `AnswerMatcher`."""
        if self._inner is not None:
            self._inner.yield_to_others()

    def close(self) -> None:
        """Stop following the answer. Closing twice is no error."""
        if self._inner is not None:
            self._inner.close()

    def _choose(self, inner: AnswerMatcher, token_id: int) -> None:
        """Assign the first token of an answer with a grammar to reasoning, or to the grammar."""
        start, *rest = self._marks.start_ids
        if token_id == start and (not rest or not inner.allowed()[start]):
            self._forced = rest
            self._state = _State.STARTING
            if not rest:
                self._enter()
        else:
            self._state = _State.AFTER
            inner.advance([token_id])

    def _look_for_start(self, token_id: int) -> None:
        """Look for a start mark at the beginning of an answer, or right after reasoning."""
        self._recent = [*self._recent, token_id][-self._marks.window :]
        has_started = self._marks.may_start_in(self._recent)
        if has_started:
            self._enter()
        elif has_started is False:
            self._state = _State.AFTER

    def _enter(self) -> None:
        """Begin reasoning."""
        self._state, self._recent = _State.INSIDE, []
        self._close_if_spent()

    def _record_inside(self, token_id: int) -> None:
        self._num_inside += 1
        self._recent = [*self._recent, token_id][-self._marks.window :]
        if (rest := self._marks.after_end(self._recent)) is not None:
            self._force_blanks(has_some=bool(rest))
        else:
            self._close_if_spent()

    def _close_if_spent(self) -> None:
        if self._budget is not None and self._num_inside >= self._budget:
            self._state, self._forced = _State.CLOSING, list(self._marks.closing_ids)

    def _force_blanks(self, *, has_some: bool) -> None:
        """End reasoning; blanks that the template writes after it come before a grammar's text."""
        needs_blanks = self._inner is not None and not has_some
        self._state = _State.CLOSING
        self._forced = list(self._marks.blank_ids) if needs_blanks else []
        if not self._forced:
            self._leave()

    def _go_on(self) -> None:
        """Go on after a forced token was sampled."""
        del self._forced[:1]
        if self._forced:
            return
        if self._state is _State.STARTING:
            self._enter()
        else:
            self._leave()

    def _leave(self) -> None:
        self._recent = []
        is_free = self._inner is None and bool(self._marks.start_ids)
        self._state = _State.BEFORE if is_free else _State.AFTER

    def _advance_inner(self, token_ids: Sequence[int]) -> None:
        if self._inner is not None:
            self._inner.advance(token_ids)
