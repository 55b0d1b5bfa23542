"""Decides how many draft tokens a step verifies, from measured times and hit rates.

A step that verifies drafts is wider: it takes several tokens of each row, and more time. It pays if
more tokens are expected of it than of plain steps in the same time. Drafts of a draft head take
time, too: steps with them are measured separately, and compete with those that need none.
"""

from __future__ import annotations

import operator
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from statistics import median
from typing import NamedTuple

from vlm_server.interfaces import DraftCounts
from vlm_server.runner.backends.interface import MAX_DRAFTING_ROWS
from vlm_server.runner.decode.drafts import FORCED_PROBABILITY, TrainedRates
from vlm_server.runner.decode.sequence import DecodingSequence
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.state_modules import can_forget

_MASK_SECONDS = 0.01
"""Longest wait for the masks of drafts; after it, the step is a plain one."""
_PRIOR_SLOPE = 0.1
"""Cost of each further token of a row, in plain steps, until it is measured."""
_MIN_GAIN = 1.08
"""Minimum gain of a wide step over plain steps, which run one ahead of the host."""
_WINDOW = 15
"""Measured steps of one kind whose median counts."""
_NUM_ASSUMED = 2
"""Steps with which a width begins, so that one disturbed step is not taken for its cost."""
_MIN_PLAIN = 4
"""Plain steps to measure before any with drafts of a head."""
_MAX_WIDE = 200
"""Steps with drafts after which plain ones are measured anew."""
_MIN_REJECTED, _MAX_REJECTED = 16, 500
"""Plain steps in spite of drafts after which wide steps may get another try; twice as many after
each try, up to the second number."""


def speculation_of(loaded: LoadedModel, num_draft_tokens: int) -> Speculation:
    """Speculation with at most `num_draft_tokens` drafts; none if this model can't verify any."""
    is_possible = num_draft_tokens and loaded.family.is_checked
    if not (is_possible and can_forget(loaded.language_model)):
        return Speculation()
    loaded.forget_positions()
    limit = num_draft_tokens + 1
    widths = sorted({min(width, limit) for width in loaded.backend.draft_widths} - {1})
    return Speculation(
        widths,
        needs_even_rows=loaded.family.needs_even_rows,
        has_head=loaded.draft_head is not None,
    )


DraftByHead = Callable[[int], list[list[int]]]
"""The next tokens of each row by a draft head, as many as asked for; waits for the device."""


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The drafts that a step of `width` tokens a row verifies.

    are_trained: for each row, whether the draft head made them. by_head: whether it made any, so
    that the step's time includes its own.
    """

    width: int
    token_ids: list[list[int]]
    are_trained: list[bool]
    by_head: bool = False


class _Guess(NamedTuple):
    """Tokens, and the probability of each if all before it are right."""

    tokens: list[int]
    chances: list[float]
    is_trained: bool = False


class Speculation:
    """The choice of drafts that the steps of one model verify."""

    def __init__(
        self,
        widths: Sequence[int] = (),
        *,
        needs_even_rows: bool = False,
        has_head: bool = False,
    ) -> None:
        """`widths`: numbers of tokens of a row that a step may take, ascending; none for no drafts.

        `needs_even_rows`: see `Family`. `has_head`: whether there is a draft head.
        """
        self.widths = widths
        self._max_drafts = max(widths, default=1) - 1
        self.needs_even_rows = needs_even_rows
        self._times = StepTimes()
        self._head_times = StepTimes()
        """Of steps with drafts of the head, which include its time."""
        self._has_head = has_head
        self._rates = TrainedRates(self._max_drafts)
        self._last: tuple[float, bool] | None = None
        """The end of the last step, and whether it was wide; None if other work ran since it
        began."""

    def can_gain(self, seqs: Sequence[DecodingSequence]) -> bool:
        """Whether to wait for the newest tokens, in order to verify drafts after them."""
        if not self.widths or len(seqs) > MAX_DRAFTING_ROWS:
            return False
        chances = [self._chances(seq) for seq in seqs]
        if best_width(self.widths, chances, self._times) > 1:
            return True
        self._reject(self._times, chances)
        if not self._has_head or self._head_times.needs_plain(len(seqs)):
            return False
        trained = [self._trained_chances(seq) for seq in seqs]
        if best_width(self.widths, trained, self._head_times) > 1:
            return True
        if self._reject(self._head_times, trained):
            self._rates.reset()
        return False

    def drafts(
        self,
        seqs: Sequence[DecodingSequence],
        eos_token_ids: frozenset[int],
        draft_by_head: DraftByHead | None = None,
    ) -> DraftChoice | None:
        """The drafts of the next step, once the host has all tokens.

        None if plain steps bring more. Drafts that grammars forbid are left out.
        """
        if self._last is not None and not self._last[1]:
            self._last = time.perf_counter(), True  # plain steps run ahead; the newest ends here
        guesses = []
        for seq in seqs:
            if (guess := self._guess(seq, eos_token_ids)) is None:
                return None
            guesses.append(guess)
        times = self._times
        if draft_by_head is not None and (width := self._width_by_head(seqs, guesses)) > 1:
            times, drafted = self._head_times, draft_by_head(width - 1)
            guesses = [
                max(guess, self._trained_guess(seq, tokens, eos_token_ids), key=_worth)
                for seq, guess, tokens in zip(seqs, guesses, drafted, strict=True)
            ]
        allowed = []
        for seq, guess in zip(seqs, guesses, strict=True):
            if (count := self._num_allowed(seq, guess.tokens)) is None:
                return None
            allowed.append(_Guess(guess.tokens[:count], guess.chances[:count], guess.is_trained))
        width = best_width(self.widths, [guess.chances for guess in allowed], times)
        if width == 1:
            return None
        return DraftChoice(
            width,
            [guess.tokens[: width - 1] for guess in allowed],
            [guess.is_trained for guess in allowed],
            by_head=times is self._head_times,
        )

    def record_step(self, rows: int, width: int, *, by_head: bool = False) -> None:
        """Record the end of a step; its time counts if the step before was of its kind."""
        if not self.widths:
            return
        now, is_wide = time.perf_counter(), width > 1
        if self._last is not None and self._last[1] == is_wide:
            for times in (self._times, self._head_times):
                if not is_wide or (times is self._head_times) == by_head:
                    times.record(rows, width, now - self._last[0])
        self._last = now, is_wide

    def record_drafts(self, counts: Iterable[DraftCounts]) -> None:
        """Record how many drafts of each row of a step were right."""
        for num_drafted, num_accepted, is_trained in counts:
            if is_trained:
                self._rates.record(num_drafted, num_accepted)

    def discard_time(self) -> None:
        """Leave out the time of the next step, during which other work runs."""
        self._last = None

    def _reject(self, times: StepTimes, chances: Sequence[Sequence[float]]) -> bool:
        """Count a plain step in spite of drafts; returns whether these had many, and are too bad.

        If it is for the measured times, wide steps soon get another try: they may have been
        disturbed.
        """
        are_good = best_width(self.widths, chances, _UNMEASURED) > 1
        has_drafts = any(map(any, chances))
        return has_drafts and times.reject(len(chances), are_good=are_good)

    def _chances(self, seq: DecodingSequence) -> list[float]:
        """The probability of each draft, before the host may have the newest token."""
        lag, limit = 0 if seq.newest_token_followed else 1, seq.num_useful_drafts(self._max_drafts)
        chances = [0.0]
        if limit and seq.drafter is not None and seq.drafter.probability:
            first, *rest = seq.drafter.probabilities(limit + 1)
            chances = [first * rest[0], *rest[1:]] if lag else [first, *rest[:-1]]
        matcher = seq.sampler.matcher
        if matcher is None:
            return chances
        if not matcher.can_look_ahead:
            return [0.0]
        num_forced = min(len(matcher.forced) - lag, limit)
        return max(chances, [FORCED_PROBABILITY] * num_forced, key=expected_tokens)

    def _trained_chances(self, seq: DecodingSequence) -> list[float]:
        """The probability of each draft that a draft head would make."""
        matcher = seq.sampler.matcher
        if matcher is not None and not matcher.can_look_ahead:
            return []
        return self._rates.probabilities(seq.num_useful_drafts(self._max_drafts))

    def _width_by_head(self, seqs: Sequence[DecodingSequence], guesses: Sequence[_Guess]) -> int:
        """The width of the next step if the head should draft for it; else 1."""
        by_head = [
            max(guess.chances, self._trained_chances(seq), key=expected_tokens)
            for seq, guess in zip(seqs, guesses, strict=True)
        ]
        chances = [guess.chances for guess in guesses]
        width, gain = _best(self.widths, by_head, self._head_times)
        return width if gain > _best(self.widths, chances, self._times)[1] else 1

    def _trained_guess(
        self, seq: DecodingSequence, tokens: list[int], eos_token_ids: frozenset[int]
    ) -> _Guess:
        chances = self._trained_chances(seq)
        guess = list(takewhile(lambda i: i not in eos_token_ids, tokens[: len(chances)]))
        return _Guess(guess, chances[: len(guess)], is_trained=True)

    def _guess(self, seq: DecodingSequence, eos_token_ids: frozenset[int]) -> _Guess | None:
        """Draft tokens that cost nothing; None if a grammar is late."""
        assert seq.drafter is not None
        limit = seq.num_useful_drafts(self._max_drafts)
        tokens = list(takewhile(lambda i: i not in eos_token_ids, seq.drafter.guess(limit)))
        guess = _Guess(tokens, seq.drafter.probabilities(len(tokens)))
        matcher = seq.sampler.matcher
        if matcher is None:
            return guess
        if not matcher.wait(_MASK_SECONDS):
            return None
        if not matcher.can_look_ahead:
            return _Guess([], [])
        forced = list(matcher.forced[:limit])
        return max(guess, _Guess(forced, [FORCED_PROBABILITY] * len(forced)), key=_worth)

    def _num_allowed(self, seq: DecodingSequence, tokens: list[int]) -> int | None:
        """The number of draft tokens that the grammar allows; None if it is late."""
        matcher = seq.sampler.matcher
        if matcher is None or not matcher.can_look_ahead:
            return len(tokens)
        matcher.look_ahead(tokens)
        return len(matcher.draft_masks()) if matcher.wait(_MASK_SECONDS) else None


def _worth(guess: _Guess) -> float:
    return expected_tokens(guess.chances)


class _Recent:
    """The newest values, and their median."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.values = deque(values, _WINDOW)
        self.median = median(self.values) if self.values else 0.0

    def record(self, value: float) -> None:
        self.values.append(value)
        self.median = median(self.values)


class StepTimes:
    """Measured times of steps that had the device to themselves, by number of rows.

    Medians of the last few, for other work disturbs some steps.
    """

    def __init__(self) -> None:
        self._plain = defaultdict[int, _Recent](_Recent)
        """Seconds of plain steps, by rows."""
        self._new_plain = defaultdict[int, list[float]](list)
        """Those measured anew, while they are few."""
        self._slopes = defaultdict[int, dict[int, _Recent]](dict)
        """Cost of each further token of a row, in plain steps, by rows and width."""
        self._num_rejected = 0
        """Plain steps in spite of drafts."""
        self._num_plain = Counter[int]()
        """Those since wide ones last got another try, by rows."""
        self._patience = defaultdict[int, int](lambda: _MIN_REJECTED)
        """As many lead to the next one."""
        self._num_tried = Counter[int]()
        """Wide steps since then, by rows."""
        self._num_wide = Counter[int]()
        """Wide steps since the last plain one was measured, by rows."""

    def needs_plain(self, rows: int) -> bool:
        """Whether the next step should be a plain one, to compare the others with.

        Without its time, a head whose drafts take too long would go on.
        """
        num_plain = len(self._plain[rows].values)
        return num_plain < _MIN_PLAIN or self._num_wide[rows] >= _MAX_WIDE

    def record(self, rows: int, width: int, seconds: float) -> None:
        """Record the time of a step of `width` tokens for each of `rows`."""
        if width == 1:
            self._record_plain(rows, seconds)
        elif (plain := self._plain[rows]).values:
            self._num_wide[rows] += 1
            self._num_tried[rows] += 1
            if self._num_tried[rows] > _WINDOW:  # they pay
                self._patience[rows] = _MIN_REJECTED
            slope = max(seconds / plain.median - 1, 0.0) / (width - 1)
            slopes = self._slopes[rows].setdefault(width, _Recent([_PRIOR_SLOPE] * _NUM_ASSUMED))
            slopes.record(slope)

    def _record_plain(self, rows: int, seconds: float) -> None:
        """Old times, of a machine that was less or more busy, count until as many new ones do."""
        if self._num_wide[rows] < _MAX_WIDE:
            self._plain[rows].record(seconds)
        else:
            self._new_plain[rows].append(seconds)
            if len(self._new_plain[rows]) < _MIN_PLAIN:
                return
            self._plain[rows] = _Recent(self._new_plain.pop(rows))
        self._num_wide[rows] = 0

    def reject(self, rows: int, *, are_good: bool) -> bool:
        """Count a plain step in spite of drafts; after many, halve what wide steps cost too much.

        They might have been disturbed, and none would be measured again. If drafts `are_good`, so
        that it is for the times, that is sooner. Returns whether it did after as many as can be.
        """
        self._num_rejected += 1
        self._num_plain[rows] += 1
        are_many = self._num_rejected >= _MAX_REJECTED
        if are_many:
            self._num_rejected = 0
        if are_many or (are_good and self._num_plain[rows] >= self._patience[rows]):
            self._patience[rows] = min(2 * self._patience[rows], _MAX_REJECTED)
            self._num_plain[rows] = self._num_tried[rows] = 0
            for width, slopes in self._slopes[rows].items():
                halved = min(slopes.median, (slopes.median + _PRIOR_SLOPE) / 2)
                self._slopes[rows][width] = _Recent([halved] * _NUM_ASSUMED)
        return are_many

    def cost(self, rows: int, width: int) -> float:
        """The time of a step, in plain steps."""
        return 1.0 + self._slope(rows, width) * (width - 1)

    def _slope(self, rows: int, width: int) -> float:
        """The slope at the nearest measured width: kernels change at some widths."""
        slopes = self._slopes[rows]
        nearest = min(slopes, key=lambda other: abs(other - width), default=0)
        return slopes[nearest].median if nearest else _PRIOR_SLOPE


_UNMEASURED = StepTimes()


def best_width(widths: Sequence[int], chances: Sequence[Sequence[float]], times: StepTimes) -> int:
    """The tokens for each row of the next step, one of `widths`, or 1.

    chances: for each row, the probability that each of its draft tokens is right if all before it
    are.
    """
    return _best(widths, chances, times)[0]


def _best(
    widths: Sequence[int], chances: Sequence[Sequence[float]], times: StepTimes
) -> tuple[int, float]:
    """The best width, and its gain over plain steps."""
    best, best_gain = 1, _MIN_GAIN
    for width in widths:
        if best > 1 and best > max(map(len, chances)):
            break  # no row has more drafts
        tokens = sum(expected_tokens(row[: width - 1]) for row in chances)
        gain = tokens / len(chances) / times.cost(len(chances), width)
        if gain > best_gain:
            best, best_gain = width, gain
    return best, best_gain


def expected_tokens(chances: Sequence[float]) -> float:
    """The expected tokens of a row whose drafts are right with these probabilities."""
    all_right: Iterable[float] = accumulate(chances, operator.mul)
    return 1.0 + sum(all_right)
