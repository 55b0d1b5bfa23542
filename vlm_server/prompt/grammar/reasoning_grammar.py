"""Reasoning before an answer: its budget, and the grammar that begins after it.

Reasoning ends where its text has the end mark, however the mark is split into tokens. The grammar's
process is not asked: nearly every token is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import KW_ONLY, dataclass

from vlm_server.errors import RequestError
from vlm_server.interfaces import AnswerMatcher, Grammar
from vlm_server.prompt.grammar.reasoning_marks import Mask, ReasoningMarks
from vlm_server.protocol import Submit


@dataclass(frozen=True, eq=False)
class ReasoningGrammar:
    """The `Grammar` of an answer that may begin with reasoning, and then follows `inner`, if any.

    budget: the most tokens of reasoning; None is no bound. starts: whether the prompt ends inside
    reasoning. may_begin: whether the answer may begin with reasoning.
    """

    marks: ReasoningMarks
    inner: Grammar | None
    budget: int | None
    _: KW_ONLY
    starts: bool
    may_begin: bool

    def begin(self, count: int) -> Sequence[AnswerMatcher]:
        """Matchers at the beginning of `count` answers of one request. Does not wait."""
        inner = [None] * count if self.inner is None else self.inner.begin(count)
        return [ReasoningMatcher(self, matcher) for matcher in inner]


def with_reasoning(
    marks: ReasoningMarks | None, grammar: Grammar | None, submit: Submit, *, starts: bool
) -> Grammar | None:
    """`grammar` after reasoning in its budget. starts: whether the prompt ends inside reasoning."""
    budget, is_asked = submit.sampling.max_reasoning_tokens, submit.template.enable_thinking
    if is_asked is None:
        is_asked = marks is not None and marks.in_channels
    may_begin = grammar is None or (is_asked and budget != 0)
    if marks is None or (budget is None and (grammar is None or not (starts or may_begin))):
        return grammar
    return ReasoningGrammar(marks, grammar, budget, starts=starts, may_begin=may_begin)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The mask of `inner`, once it is known, and a token of the mark that begins reasoning."""

    inner: AnswerMatcher
    token_id: int


_Masks = Generator[Mask | _Choice, int, None]


def _reason(grammar: ReasoningGrammar, inner: AnswerMatcher | None) -> _Masks:
    """Yields the masks of an answer up to its own text; receives each sampled token."""
    marks, num_shared = grammar.marks, 0
    if not grammar.starts:
        if not grammar.may_begin or not marks.start_ids:
            return
        if inner is not None:
            num_shared = yield from _choose(marks, inner)
        elif not (yield from _look_for_start(marks)):
            return
        if num_shared == len(marks.start_ids):
            return
    before_answer = [*marks.after_ids, *marks.start_ids[:num_shared]]
    num_left = math.inf if grammar.budget is None else grammar.budget
    while True:
        num_left = yield from _inside(marks, inner, num_left, before_answer)
        if inner is not None or not marks.start_ids or not (yield from _look_for_start(marks)):
            return


def _choose(marks: ReasoningMarks, inner: AnswerMatcher) -> Generator[Mask | _Choice, int, int]:
    """Returns the number of tokens with which reasoning begins as the grammar's text does, and
    which `inner` has followed; all of the start mark's if the answer is that text."""
    for num_shared, start in enumerate(marks.start_ids):
        token_id = yield _Choice(inner, start)
        is_inner = bool(inner.allowed()[start]) and len(marks.start_ids) > 1
        if token_id == start and not is_inner:
            yield from _force(marks, marks.start_ids[num_shared + 1 :])
            return num_shared
        inner.advance([token_id])
        if token_id != start:
            break
    return len(marks.start_ids)


def _look_for_start(marks: ReasoningMarks) -> Generator[Mask, int, bool]:
    """Returns whether reasoning begins here, in an answer without a grammar."""
    recent: list[int] = []
    has_started = None
    while has_started is None:
        recent = [*recent, (yield marks.everything)][-marks.window :]
        has_started = marks.may_start_in(recent)
    return has_started


def _inside(
    marks: ReasoningMarks,
    inner: AnswerMatcher | None,
    num_left: float,
    before_answer: Sequence[int],
) -> Generator[Mask, int, float]:
    """Yields the masks of at most `num_left` tokens of reasoning; returns how many are left.

    before_answer: what comes between the end mark and the text of `inner`.
    """
    recent: list[int] = []
    while num_left > 0:
        token_id = yield marks.everything if inner is None else marks.mask_inside(recent)
        num_left -= 1
        recent = [*recent, token_id][-marks.window :]
        rest = marks.text_after_end(recent)
        if rest is not None:
            if inner is not None and not rest:
                yield from _force(marks, before_answer)
            return num_left
    yield from _force(marks, marks.closing_ids)
    if inner is not None:
        yield from _force(marks, before_answer[len(marks.after_ids) :])
    return num_left


def _force(marks: ReasoningMarks, token_ids: Sequence[int]) -> Generator[Mask, int, None]:
    for token_id in token_ids:
        yield marks.only(token_id)


def _with(allowed: Mask, token_id: int) -> Mask:
    allowed = allowed.copy()
    allowed[token_id] = True
    return allowed


class ReasoningMatcher:
    """Follows one answer: see `ReasoningGrammar`."""

    def __init__(self, grammar: ReasoningGrammar, inner: AnswerMatcher | None) -> None:
        self._everything = grammar.marks.everything
        self._inner = inner
        self._reasoning = _reason(grammar, inner)
        self._mask = next(self._reasoning, None)
        """The allowed tokens, until the answer's own text begins."""

    @property
    def error(self) -> RequestError | None:
        return self._inner.error if self._inner else None

    @property
    def _active(self) -> AnswerMatcher | None:
        """The matcher of the grammar, once the answer follows it."""
        return self._inner if self._mask is None else None

    @property
    def can_look_ahead(self) -> bool:
        """Whether the answer has begun and follows a grammar."""
        return self._active is not None

    @property
    def forced(self) -> Sequence[int]:
        """Tokens that the grammar forces next; none inside reasoning."""
        return self._active.forced if self._active else ()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append sampled tokens. Does not wait."""
        for i, token_id in enumerate(token_ids):
            if self._mask is None:
                if self._inner:
                    self._inner.advance(token_ids[i:])
                return
            try:
                self._mask = self._reasoning.send(token_id)
            except StopIteration:
                self._mask = None

    def look_ahead(self, token_ids: Sequence[int]) -> None:
        """Request the masks after draft tokens; ignored inside reasoning."""
        if self._active:
            self._active.look_ahead(token_ids)

    def draft_masks(self) -> Sequence[Mask]:
        """See `AnswerMatcher`."""
        return self._active.draft_masks() if self._active else ()

    def wait(self, seconds: float) -> bool:
        """Whether `allowed` is known within `seconds`; inside reasoning it always is."""
        asked = self._mask.inner if isinstance(self._mask, _Choice) else self._active
        return asked is None or asked.wait(seconds)

    def allowed(self) -> Mask:
        """(vocabulary,) bool: allowed next tokens. Equal masks are mostly the same array."""
        mask = self._mask
        if isinstance(mask, _Choice):
            return _with(mask.inner.allowed(), mask.token_id)
        if mask is not None:
            return mask
        return self._inner.allowed() if self._inner else self._everything

    def lower_priority(self) -> None:
        """See `AnswerMatcher`."""
        if self._inner:
            self._inner.lower_priority()

    def close(self) -> None:
        """Stop following the answer. Closing twice is no error."""
        if self._inner:
            self._inner.close()
