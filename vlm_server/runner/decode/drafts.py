"""Drafts of a sequence's next tokens, looked up in its prompt and answer.

Prompt lookup (Saxena 2023; vLLM's n-gram speculation): agents repeat names of elements, keys of
JSON, and text of their prompts. The draft is the continuation of the longest earlier occurrence of
the sequence's last tokens. Its hit rate counts every sampled token, whether the draft was used or
not; where the rate is low, no draft is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

MIN_MATCH = 2
"""Minimum length of a match."""
_MAX_MATCH = 16
"""Longer matches count as equally long."""
_PRIOR_WEIGHT = 4.0
_PRIORS = ((2, 0.3), (3, 0.5), (5, 0.7), (9, 0.85))
"""(minimum match, prior probability that a draft is right)."""
_TRAINED_PRIOR = 0.7
"""Prior probability that a guess of a draft head is right."""
_MEMORY = 64.0
"""Number of guesses at which all earlier ones are halved in weight."""
FORCED_PROBABILITY = 0.9
"""Probability that a model splits text that a grammar forces into the tokenizer's tokens."""


class _HitRate:
    """The share of recent guesses that were right."""

    def __init__(self, prior: float = 0.0) -> None:
        self._prior = prior
        self._hits = self._count = 0.0
        self.probability = prior

    def record(self, *, is_hit: bool) -> None:
        weight = 0.5 if self._count >= _MEMORY else 1.0
        self._hits, self._count = weight * self._hits + is_hit, weight * self._count + 1
        self.probability = self.given(self._prior)

    def given(self, prior: float) -> float:
        """The probability that the next guess is right, if it was `prior` before any guess."""
        return (self._hits + _PRIOR_WEIGHT * prior) / (self._count + _PRIOR_WEIGHT)


class TrainedRates:
    """How often the guesses of a draft head were right, if all before them were.

    Until a guess was tried, it is taken to be as good as the one before it.
    """

    def __init__(self, count: int) -> None:
        """count: the maximum number of its guesses in a step."""
        self._count = count
        self.reset()

    def reset(self) -> None:
        """Forget them, as after text of another kind."""
        self._rates = [_HitRate() for _ in range(self._count)]

    def probabilities(self, count: int) -> list[float]:
        """Of each of the next `count` guesses."""
        rates = accumulate(
            self._rates[:count], lambda p, rate: rate.given(p), initial=_TRAINED_PRIOR
        )
        return list(rates)[1:]

    def record(self, num_drafted: int, num_right: int) -> None:
        """Record the guesses for one sequence in a step, of which the first `num_right` were."""
        for place, rate in enumerate(self._rates[: min(num_drafted, num_right + 1)]):
            rate.record(is_hit=place < num_right)


class Drafter:
    """The tokens of one sequence, and the guess of its next ones."""

    def __init__(self, prompt_ids: NDArray[np.int32], prediction_ids: Sequence[int] = ()) -> None:
        """`prediction_ids`: the predicted answer, which is guessed first."""
        token_ids = np.concatenate([np.fromiter(prediction_ids, dtype=np.int32), prompt_ids])
        self._length = len(token_ids)
        self._tokens = np.empty(max(2 * self._length, 256), dtype=np.int32)
        self._tokens[: self._length] = token_ids
        self._rates = [_HitRate(prior) for _, prior in _PRIORS]
        self._next = 0
        """Index of the guessed next token."""
        self._match = 0
        """Number of tokens before it that equal the last ones; 0 without a guess."""
        if len(prediction_ids):
            self._match = _MAX_MATCH
        else:
            self._find()

    @property
    def probability(self) -> float:
        """The probability that the next token is as guessed; 0 without a guess."""
        return self.probabilities(1)[0]

    def append(self, token_id: int) -> None:
        """Append a token, and record whether it was guessed."""
        is_hit = bool(self._match and self._tokens[self._next] == token_id)
        if self._match:
            self._rates[_level(self._match)].record(is_hit=is_hit)
        if self._length == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[self._length] = token_id
        self._length += 1
        if is_hit:
            self._next += 1
            self._match = min(self._match + 1, _MAX_MATCH)
        else:
            self._find()

    def guess(self, count: int) -> list[int]:
        """The next tokens, at most `count`; none without a match."""
        if not self._match:
            return []
        places = self._next + np.arange(count) % (self._length - self._next)
        draft: list[int] = self._tokens[places].tolist()
        return draft

    def probabilities(self, count: int) -> list[float]:
        """The probability of each of the next `count` guesses, if all before it are right."""
        if not self._match:
            return [0.0] * count
        return [self._rates[_level(self._match + i)].probability for i in range(count)]

    def _find(self) -> None:
        """Find the longest match; of equally long ones, the newest."""
        tokens, last = self._tokens[: self._length], self._length - 1
        self._match = 0
        if last < MIN_MATCH:
            return
        ends = np.flatnonzero(tokens[:last] == tokens[last])
        length = 1
        while len(ends) and length < _MAX_MATCH:
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[last - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if length >= MIN_MATCH:
            self._match, self._next = length, int(ends[-1]) + 1


def _level(match: int) -> int:
    """The index in `_PRIORS` of a match of this length."""
    return max(sum(match >= least for least, _ in _PRIORS) - 1, 0)
