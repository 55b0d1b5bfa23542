"""Decides how many draft tokens a step verifies, from measured times and hit rates.

A step that verifies drafts is wider: it takes several tokens of each row, and longer. It is worth
it if more tokens are expected in its time than plain steps bring.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_vlm.models.cache import KVCache, make_prompt_cache

from vlm_server.runner.backends.interface import MAX_DRAFTING_ROWS
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.text.drafts import FORCED_PROBABILITY
from vlm_server.runner.text.sequence import DecodingSequence

_MASK_SECONDS = 0.01
"""Longest wait for the grammars of drafts; then the step goes without."""
_PRIOR_SLOPE = 0.1
"""Cost of each further token of a row, in plain steps, until it is measured."""
_LEAST_GAIN = 1.15
"""Least gain of a wide step over plain steps, which run one ahead of the host."""
_WEIGHT = 0.2
"""Weight of a new measurement."""
_OUTLIER = 4.0
"""Factor above the usual time from which a time says more of the machine than of the step."""


def speculation_of(loaded: LoadedModel, num_draft_tokens: int) -> Speculation | None:
    """Speculation with drafts of at most so many tokens; None if this model can't verify any.

    Layers with windows or recurrent states can't remove tokens that were wrong. A model that
    `needs_even_rows` takes no keys beyond its longest row.
    """
    layers = make_prompt_cache(loaded.language_model)
    if not (loaded.family.is_checked and all(type(layer) is KVCache for layer in layers)):
        return None
    most = num_draft_tokens + 1
    widths = sorted({min(width, most) for width in loaded.backend.draft_widths} - {1})
    if not widths:
        return None
    return Speculation(widths, needs_even_rows=loaded.family.needs_even_rows)


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts that the next step verifies: at most `width` - 1 tokens of each row."""

    width: int
    token_ids: list[list[int]]


class Speculation:
    """The choice of drafts that the steps of one model verify."""

    def __init__(self, widths: Sequence[int], *, needs_even_rows: bool = False) -> None:
        """`widths`: how many tokens of a row a step may take, ascending.

        `needs_even_rows`: see `Family`.
        """
        self._widths = widths
        self._most = max(widths) - 1
        self.needs_even_rows = needs_even_rows
        self._times = StepTimes()
        self._last: tuple[float, int] | None = None
        """When the step before ended, and its width, if nothing else ran since it began."""

    def may_be_worth_it(self, seqs: Sequence[DecodingSequence]) -> bool:
        """Whether to wait for the newest tokens, in order to verify what may follow them."""
        if len(seqs) > MAX_DRAFTING_ROWS:
            return False
        return best_width(self._widths, [self._chances(seq) for seq in seqs], self._times) > 1

    def drafts(
        self, seqs: Sequence[DecodingSequence], eos_token_ids: frozenset[int]
    ) -> Drafts | None:
        """The drafts to verify, once all tokens are known; None if plain steps bring more.

        Grammars are asked what may follow drafts: what they forbid is left out.
        """
        guesses = [self._guess(seq, eos_token_ids) for seq in seqs]
        if None in guesses:
            return None
        found = [guess for guess in guesses if guess is not None]
        chances = [chance for _, chance in found]
        width = best_width(self._widths, chances, self._times)
        if width == 1:
            return None
        return Drafts(width, [tokens[: width - 1] for tokens, _ in found])

    def record_step(self, rows: int, width: int) -> None:
        """Record the end of a step; its time counts if the one before was of its kind."""
        now, last = time.perf_counter(), self._last
        if last is not None and (last[1] > 1) == (width > 1):
            self._times.record(rows, width, now - last[0])
        self._last = now, width

    def discard_time(self) -> None:
        """Don't count the next step: its time is not that of a step alone."""
        self._last = None

    def _chances(self, seq: DecodingSequence) -> list[float]:
        """The probability of each draft, while the newest token may not be known yet."""
        lag, most = 0 if seq.is_known else 1, self._useful(seq)
        chances = [0.0]
        if most and seq.drafter is not None and seq.drafter.probability:
            first, *rest = seq.drafter.probabilities(most + 1)
            chances = [first * rest[0], *rest[1:]] if lag else [first, *rest[:-1]]
        matcher = seq.sampler.matcher
        if matcher is None:
            return chances
        if not matcher.can_look_ahead:
            return [0.0]
        num_forced = min(len(matcher.forced) - lag, most)
        return max(chances, [FORCED_PROBABILITY] * num_forced, key=expected_tokens)

    def _useful(self, seq: DecodingSequence) -> int:
        """The most draft tokens of a sequence: no more than its answer may have left."""
        left = seq.num_useful_drafts
        return self._most if left is None else min(self._most, left)

    def _guess(
        self, seq: DecodingSequence, eos_token_ids: frozenset[int]
    ) -> tuple[list[int], list[float]] | None:
        """Draft tokens and how likely each is right; None if a grammar is late."""
        assert seq.drafter is not None
        most = self._useful(seq)
        guess = _before_end(seq.drafter.guess(most), eos_token_ids)
        chances = seq.drafter.probabilities(len(guess))
        matcher = seq.sampler.matcher
        if matcher is None:
            return guess, chances
        if not matcher.wait(_MASK_SECONDS):
            return None
        if not matcher.can_look_ahead:
            return [], []
        forced = list(matcher.forced[:most])
        forced_chances = [FORCED_PROBABILITY] * len(forced)
        if expected_tokens(forced_chances) > expected_tokens(chances):
            guess, chances = forced, forced_chances
        matcher.look_ahead(guess)
        if not matcher.wait(_MASK_SECONDS):
            return None
        count = len(matcher.ahead())
        return guess[:count], chances[:count]


def _before_end(token_ids: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    for i, token_id in enumerate(token_ids):
        if token_id in eos_token_ids:
            return token_ids[:i]
    return token_ids


class StepTimes:
    """Measured times of steps, by the number of rows; of steps that had the device alone."""

    def __init__(self) -> None:
        self._plain = dict[int, float]()
        """Seconds of a plain step, by rows."""
        self._slopes = dict[int, dict[int, float]]()
        """Cost of each further token of a row, in plain steps, by rows and width."""

    def record(self, rows: int, width: int, seconds: float) -> None:
        """Record the time of a step of `width` tokens for each of `rows`."""
        if width == 1:
            known = self._plain.get(rows)
            if known is None or seconds < _OUTLIER * known:
                self._plain[rows] = _mixed(known, seconds)
        elif rows in self._plain:
            slope = max(seconds / self._plain[rows] - 1, 0.0) / (width - 1)
            known = self._slope(rows, width)
            most = _OUTLIER * max(known, _PRIOR_SLOPE)
            self._slopes.setdefault(rows, {})[width] = _mixed(known, min(slope, most))

    def cost(self, rows: int, width: int) -> float:
        """The time of a step in plain steps."""
        return 1.0 + self._slope(rows, width) * (width - 1)

    def _slope(self, rows: int, width: int) -> float:
        """The slope at the nearest width that was measured: kernels change at some widths."""
        measured = self._slopes.get(rows, {})
        if not measured:
            return _PRIOR_SLOPE
        return measured[min(measured, key=lambda one: abs(one - width))]


def _mixed(known: float | None, new: float) -> float:
    return new if known is None else known + _WEIGHT * (new - known)


def best_width(widths: Sequence[int], chances: Sequence[Sequence[float]], times: StepTimes) -> int:
    """The tokens for each row of the next step, one of `widths`, or 1.

    chances: for each row, the probability that each of its draft tokens is right if all before it
    are.
    """
    best, most = 1, _LEAST_GAIN
    for width in widths:
        if best > 1 and best > max(map(len, chances)):
            break  # no row has more drafts
        tokens = sum(expected_tokens(row[: width - 1]) for row in chances)
        gain = tokens / len(chances) / times.cost(len(chances), width)
        if gain > most:
            best, most = width, gain
    return best


def expected_tokens(chances: Sequence[float]) -> float:
    """The expected tokens of a row whose drafts are right with these probabilities."""
    total, all_right = 1.0, 1.0
    for chance in chances:
        all_right *= chance
        total += all_right
    return total
