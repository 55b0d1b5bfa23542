"""Decides how many draft tokens a step verifies, from measured times and hit rates.

A step that verifies drafts is wider: it takes several tokens of each row, and more time. It pays if
more tokens are expected of it than of plain steps in the same time.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate, takewhile

from vlm_server.runner.backends.interface import MAX_DRAFTING_ROWS
from vlm_server.runner.decode.drafts import FORCED_PROBABILITY
from vlm_server.runner.decode.sequence import DecodingSequence
from vlm_server.runner.kv.layers import can_store, has_states, new_layers
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.state_modules import records_states

_MASK_SECONDS = 0.01
"""Longest wait for the masks of drafts; after it, the step is a plain one."""
_PRIOR_SLOPE = 0.1
"""Cost of each further token of a row, in plain steps, until it is measured."""
_MIN_GAIN = 1.15
"""Minimum gain of a wide step over plain steps, which run one ahead of the host."""
_WEIGHT = 0.2
"""Weight of a new measurement."""
_OUTLIER = 4.0
"""Factor above the usual time from which a measurement is taken for a disturbance."""
_MAX_REJECTED = 500
"""Plain steps in spite of drafts after which wide steps may get another try."""


def speculation_of(loaded: LoadedModel, num_draft_tokens: int) -> Speculation:
    """Speculation with at most `num_draft_tokens` drafts; none if this model can't verify any."""
    if not (num_draft_tokens and loaded.family.is_checked and _can_forget(loaded)):
        return Speculation()
    limit = num_draft_tokens + 1
    widths = sorted({min(width, limit) for width in loaded.backend.draft_widths} - {1})
    return Speculation(widths, needs_even_rows=loaded.family.needs_even_rows)


def _can_forget(loaded: LoadedModel) -> bool:
    """Whether the layers of this model can remove rejected tokens."""
    model = loaded.language_model
    if not can_store(model):
        return False
    can_forget = not has_states(new_layers(model)) or records_states(model)
    loaded.forget_positions()
    return can_forget


class Speculation:
    """The choice of drafts that the steps of one model verify."""

    def __init__(self, widths: Sequence[int] = (), *, needs_even_rows: bool = False) -> None:
        """`widths`: numbers of tokens of a row that a step may take, ascending; none for no drafts.

        `needs_even_rows`: see `Family`.
        """
        self.widths = widths
        self._max_drafts = max(widths, default=1) - 1
        self.needs_even_rows = needs_even_rows
        self._times = StepTimes()
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
        if any(map(any, chances)):
            self._times.reject(len(seqs))
        return False

    def drafts(
        self, seqs: Sequence[DecodingSequence], eos_token_ids: frozenset[int]
    ) -> tuple[int, list[list[int]]] | None:
        """The width of the next step, and the drafts of each row, once the host has all tokens.

        None if plain steps bring more. Drafts that grammars forbid are left out.
        """
        if self._last is not None and not self._last[1]:
            self._last = time.perf_counter(), True  # plain steps run ahead; the newest ends here
        guesses = []
        for seq in seqs:
            if (guess := self._guess(seq, eos_token_ids)) is None:
                return None
            guesses.append(guess)
        width = best_width(self.widths, [chances for _, chances in guesses], self._times)
        return None if width == 1 else (width, [tokens[: width - 1] for tokens, _ in guesses])

    def record_step(self, rows: int, width: int) -> None:
        """Record the end of a step; its time counts if the step before was of its kind."""
        if not self.widths:
            return
        now, is_wide = time.perf_counter(), width > 1
        if self._last is not None and self._last[1] == is_wide:
            self._times.record(rows, width, now - self._last[0])
        self._last = now, is_wide

    def discard_time(self) -> None:
        """Leave out the time of the next step, during which other work runs."""
        self._last = None

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

    def _guess(
        self, seq: DecodingSequence, eos_token_ids: frozenset[int]
    ) -> tuple[list[int], list[float]] | None:
        """Draft tokens and the probability of each; None if a grammar is late."""
        assert seq.drafter is not None
        limit = seq.num_useful_drafts(self._max_drafts)
        guess = list(takewhile(lambda i: i not in eos_token_ids, seq.drafter.guess(limit)))
        chances = seq.drafter.probabilities(len(guess))
        matcher = seq.sampler.matcher
        if matcher is None:
            return guess, chances
        if not matcher.wait(_MASK_SECONDS):
            return None
        if not matcher.can_look_ahead:
            return [], []
        forced = list(matcher.forced[:limit]), [FORCED_PROBABILITY] * len(matcher.forced[:limit])
        guess, chances = max(
            (guess, chances), forced, key=lambda drafts: expected_tokens(drafts[1])
        )
        matcher.look_ahead(guess)
        if not matcher.wait(_MASK_SECONDS):
            return None
        count = len(matcher.draft_masks())
        return guess[:count], chances[:count]


class StepTimes:
    """Measured times of steps that had the device to themselves, by number of rows."""

    def __init__(self) -> None:
        self._plain = dict[int, float]()
        """Seconds of a plain step, by rows."""
        self._slopes = dict[int, dict[int, float]]()
        """Cost of each further token of a row, in plain steps, by rows and width."""
        self._num_rejected = 0

    def record(self, rows: int, width: int, seconds: float) -> None:
        """Record the time of a step of `width` tokens for each of `rows`."""
        if width == 1:
            average = self._plain.get(rows)
            if average is None or seconds < _OUTLIER * average:
                self._plain[rows] = _moving_average(average, seconds)
        elif rows in self._plain:
            slope = max(seconds / self._plain[rows] - 1, 0.0) / (width - 1)
            average = self._slope(rows, width)
            limit = _OUTLIER * max(average, _PRIOR_SLOPE)
            self._slopes.setdefault(rows, {})[width] = _moving_average(average, min(slope, limit))

    def reject(self, rows: int) -> None:
        """Count a plain step in spite of drafts; after many, halve what wide steps cost too much.

        They might have been disturbed, and none would be measured again.
        """
        self._num_rejected += 1
        if self._num_rejected == _MAX_REJECTED:
            self._num_rejected = 0
            slopes = self._slopes.get(rows, {})
            for width, slope in slopes.items():
                slopes[width] = min(slope, (slope + _PRIOR_SLOPE) / 2)

    def cost(self, rows: int, width: int) -> float:
        """The time of a step, in plain steps."""
        return 1.0 + self._slope(rows, width) * (width - 1)

    def _slope(self, rows: int, width: int) -> float:
        """The slope at the nearest measured width: kernels change at some widths."""
        slopes = self._slopes.get(rows, {})
        nearest = min(slopes, key=lambda other: abs(other - width), default=0)
        return slopes.get(nearest, _PRIOR_SLOPE)


def _moving_average(average: float | None, seconds: float) -> float:
    return seconds if average is None else average + _WEIGHT * (seconds - average)


def best_width(widths: Sequence[int], chances: Sequence[Sequence[float]], times: StepTimes) -> int:
    """The tokens for each row of the next step, one of `widths`, or 1.

    chances: for each row, the probability that each of its draft tokens is right if all before it
    are.
    """
    best, best_gain = 1, _MIN_GAIN
    for width in widths:
        if best > 1 and best > max(map(len, chances)):
            break  # no row has more drafts
        tokens = sum(expected_tokens(row[: width - 1]) for row in chances)
        gain = tokens / len(chances) / times.cost(len(chances), width)
        if gain > best_gain:
            best, best_gain = width, gain
    return best


def expected_tokens(chances: Sequence[float]) -> float:
    """The expected tokens of a row whose drafts are right with these probabilities."""
    all_right: Iterable[float] = accumulate(chances, operator.mul)
    return 1.0 + sum(all_right)
