"""Reasoning before an answer: a grammar begins after it, and a budget ends it.

It ends where its text has the end mark, however that is split into tokens. The grammar's process
has no part in it: nearly every token is allowed.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import RequestError
from vlm_server.interfaces import AnswerMatcher, Grammar
from vlm_server.prompt.reasoning_marks import ReasoningMarks
from vlm_server.protocol import Submit


@dataclass(frozen=True, eq=False)
class ReasoningGrammar:
    """The `Grammar` of an answer that may begin with reasoning, and then follows `inner`, if any.

    budget: the most tokens of reasoning; None is no bound. starts: whether the prompt ends inside
    reasoning. may_begin: whether the answer may begin with it.
    """

    marks: ReasoningMarks
    inner: Grammar | None
    budget: int | None
    _: KW_ONLY
    starts: bool
    may_begin: bool

    def begin(self, count: int) -> Sequence[AnswerMatcher]:
        """Matchers at the beginning of `count` answers of one request. Returns at once."""
        inner = [None] * count if self.inner is None else self.inner.begin(count)
        return [ReasoningMatcher(self, each) for each in inner]


def with_reasoning(
    marks: ReasoningMarks | None, grammar: Grammar | None, submit: Submit, *, starts: bool
) -> Grammar | None:
    """`grammar` after reasoning in its budget. starts: whether the prompt ends inside reasoning."""
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

    def __init__(self, grammar: ReasoningGrammar, inner: AnswerMatcher | None) -> None:
        self._marks = grammar.marks
        self._inner = inner
        self._budget = grammar.budget
        self._forced: list[int] = []
        """The next tokens, where there is no choice."""
        self._recent: list[int] = []
        """The last sampled tokens, which may be part of a mark."""
        self._num_inside = 0
        self._state = _State.BEFORE
        self._first: NDArray[np.bool_] | None = None
        if grammar.starts:
            self._enter()
        elif not grammar.may_begin or not self._marks.start_ids:
            self._state = _State.AFTER
        elif inner is not None:
            self._first = self._marks.with_start(inner.allowed())

    @property
    def fault(self) -> RequestError | None:
        return self._inner.fault if self._inner else None

    @property
    def _active(self) -> AnswerMatcher | None:
        """The matcher of the grammar, once the answer follows it."""
        return self._inner if self._state is _State.AFTER else None

    @property
    def can_look_ahead(self) -> bool:
        """Whether the answer has begun, and follows a grammar."""
        return self._active is not None

    @property
    def forced(self) -> Sequence[int]:
        """Tokens that the grammar forces next; none inside reasoning."""
        return self._active.forced if self._active else ()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append sampled tokens. Returns at once."""
        for i, token_id in enumerate(token_ids):
            match self._state:
                case _State.AFTER:
                    if self._inner:
                        self._inner.advance(token_ids[i:])
                    return
                case _State.BEFORE if self._inner is not None:
                    self._choose(self._inner, token_id)
                case _State.BEFORE:
                    self._look_for_start(token_id)
                case _State.INSIDE:
                    self._record_inside(token_id)
                case _State.STARTING | _State.CLOSING:
                    del self._forced[:1]
                    self._go_on()

    def look_ahead(self, token_ids: Sequence[int]) -> None:
        """Request the masks after draft tokens; ignored inside reasoning."""
        if self._active:
            self._active.look_ahead(token_ids)

    def ahead(self) -> Sequence[NDArray[np.bool_]]:
        """See `AnswerMatcher`."""
        return self._active.ahead() if self._active else ()

    def wait(self, seconds: float) -> bool:
        """Whether `allowed` is known within `seconds`; inside reasoning it always is."""
        return self._active is None or self._active.wait(seconds)

    def allowed(self) -> NDArray[np.bool_]:
        """(vocabulary,) bool: allowed next tokens. Equal masks are mostly the same array."""
        if self._forced:
            return self._marks.only(self._forced[0])
        if self._active:
            return self._active.allowed()
        if self._inner is None:
            return self._marks.everything
        if self._state is _State.INSIDE:
            return self._marks.inside(self._recent)
        assert self._first is not None
        return self._first

    def yield_to_others(self) -> None:
        """See `AnswerMatcher`."""
        if self._inner:
            self._inner.yield_to_others()

    def close(self) -> None:
        """Stop following the answer. Closing twice is no error."""
        if self._inner:
            self._inner.close()

    def _choose(self, inner: AnswerMatcher, token_id: int) -> None:
        """Assign the first token of an answer with a grammar to reasoning, or to the grammar."""
        start, *rest = self._marks.start_ids
        if token_id == start and (not rest or not inner.allowed()[start]):
            self._state, self._forced = _State.STARTING, rest
            self._go_on()
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
        rest = self._marks.after_end(self._recent)
        if rest is None:
            self._close_if_spent()
            return
        # Blanks that the template writes after reasoning come before a grammar's text.
        needs_blanks = self._inner is not None and not rest
        self._state = _State.CLOSING
        self._forced = list(self._marks.blank_ids) if needs_blanks else []
        self._go_on()

    def _close_if_spent(self) -> None:
        if self._budget is not None and self._num_inside >= self._budget:
            self._state, self._forced = _State.CLOSING, list(self._marks.closing_ids)

    def _go_on(self) -> None:
        """Begin or end reasoning, unless more tokens are forced before."""
        if self._forced:
            return
        if self._state is _State.STARTING:
            self._enter()
        else:
            self._recent = []
            is_free = self._inner is None and bool(self._marks.start_ids)
            self._state = _State.BEFORE if is_free else _State.AFTER
