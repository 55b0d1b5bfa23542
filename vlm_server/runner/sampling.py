"""Samples the next token of each row on the device, and computes log probabilities of tokens.

A row's token depends on its own seed, step and logits alone, so that it is the same in every batch.
All plainly greedy rows cost one argmax. A row without finite scores gets `NO_TOKEN`, and the other
rows their own tokens.
"""

from __future__ import annotations

import copy
import logging
import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import msgspec
import numpy as np
from numpy.typing import NDArray

from vlm_server.interfaces import AnswerMatcher, SeqId, TokenLogprobs
from vlm_server.protocol import SamplingParams
from vlm_server.runner.device.arrays import to_numpy

logger = logging.getLogger(__name__)

NO_TOKEN = -1
"""The token of a row whose best score is NaN or infinite."""

_MIN_TEMPERATURE, _MIN_TOP_P, _MIN_REPETITION_PENALTY = 1e-5, 1e-9, 1e-6
"""Smaller values would overflow."""
_MASK_64 = (1 << 64) - 1


class SequenceSampler:
    """The sampling parameters and state of one row: its steps and, for penalties, its tokens."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: NDArray[np.int32],
        eos_token_ids: frozenset[int],
        vocabulary_size: int,
        matcher: AnswerMatcher | None = None,
    ) -> None:
        self.params = params
        self.matcher = matcher
        """The grammar of its answer; sampling needs `take_mask` first."""
        self._allowed: mx.array | None = None
        """(vocabulary,) bool: the tokens that the grammar allows next; None without a grammar."""
        self._mask: NDArray[np.bool_] | None = None
        """The array that `_allowed` is a copy of."""
        self.take_mask()
        self.temperature = params.temperature or 0.0
        """Zero for greedy."""
        top_p = 1.0 if params.top_p is None else params.top_p
        self.top_p = math.inf if top_p >= 1 else max(top_p, _MIN_TOP_P)
        self.top_k = params.top_k or vocabulary_size
        self.min_p = params.min_p or 0.0
        penalty = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        self._repetition_penalty = max(penalty, _MIN_REPETITION_PENALTY)
        self._seed = secrets.randbits(63) if params.seed is None else params.seed
        self._step = 0
        with_logits = sorted(i for i in eos_token_ids if 0 <= i < vocabulary_size)  # not all have
        self._eos = mx.array(with_logits) if with_logits and params.min_tokens else None
        self._bias: mx.array | None = None
        if params.logit_bias:
            bias = np.zeros(vocabulary_size, dtype=np.float32)
            bias[list(params.logit_bias)] = list(params.logit_bias.values())
            self._bias = mx.array(bias)
        self._counts: mx.array | None = None
        """(vocabulary,) float32: how often this answer has each token; None if not needed."""
        if params.presence_penalty or params.frequency_penalty or penalty != 1:
            self._counts = mx.zeros(vocabulary_size)
        self._prompt_has: mx.array | None = None
        if penalty != 1:
            has = np.zeros(vocabulary_size, dtype=np.bool_)
            has[prompt_ids[prompt_ids < vocabulary_size]] = True
            self._prompt_has = mx.array(has)

    @property
    def is_plainly_greedy(self) -> bool:
        """Whether its token is the best one by unchanged logits."""
        return self.temperature == 0 and not (
            self._allowed is not None
            or self._bias is not None
            or self._counts is not None
            or self._step < self.params.min_tokens
        )

    def adjust(self, scores: mx.array) -> mx.array:
        """`scores` (vocabulary,) with grammar, bias, penalties and minimum length applied."""
        if self._allowed is not None:
            scores = mx.where(self._allowed, scores, -mx.inf)
        if self._bias is not None:
            scores = scores + self._bias
        if self._counts is not None:
            scores = self._penalize(scores, self._counts)
        if self._eos is not None and self._step < self.params.min_tokens:
            scores[self._eos] = -mx.inf
        return scores

    def key(self) -> mx.array:
        """The random key of this row's next token."""
        return mx.random.key(_mix(self._seed, self._step))

    def advance(self, token: mx.array) -> None:
        """Count `token`, (), which was sampled; it need not be evaluated yet."""
        self._step += 1
        if self._counts is not None:
            self._counts = self._counts.at[token].add(1.0)

    def after(self, token_id: int, allowed: NDArray[np.bool_] | None = None) -> SequenceSampler:
        """The sampler of the token after `token_id`, if that is sampled next.

        `allowed`, (vocabulary,): the grammar's mask for that token, if there is a grammar.
        """
        sampler = copy.copy(self)
        sampler.advance(mx.array(token_id))
        if allowed is not None:
            sampler._use(allowed)
        return sampler

    def follow(self, token_ids: Sequence[int]) -> None:
        """Advance the grammar by the newest tokens, once the host has them."""
        if self.matcher is not None:
            self.matcher.advance([i for i in token_ids if i != NO_TOKEN])

    def close(self) -> None:
        """Release the grammar: the row has left the batch."""
        if self.matcher is not None:
            self.matcher.close()

    def take_mask(self) -> None:
        """Sample with the grammar's present mask; if it allows nothing, this row alone ends."""
        if self.matcher is not None:
            self._use(self.matcher.allowed())

    @property
    def state(self) -> list[mx.array]:
        """Arrays to evaluate in each step; left lazy, their graphs would grow."""
        return [] if self._counts is None else [self._counts]

    def _use(self, allowed: NDArray[np.bool_]) -> None:
        if allowed is not self._mask:  # inside reasoning, masks are mostly the same object
            self._mask, self._allowed = allowed, mx.array(allowed)

    def _penalize(self, scores: mx.array, counts: mx.array) -> mx.array:
        """Presence and frequency as OpenAI defines them; repetition as CTRL (Keskar 2019)."""
        params, has = self.params, counts > 0
        if self._prompt_has is not None:
            seen = mx.logical_or(has, self._prompt_has)
            factor = self._repetition_penalty
            scores = mx.where(seen, mx.where(scores > 0, scores / factor, scores * factor), scores)
        return scores - params.frequency_penalty * counts - params.presence_penalty * has


def choice_params(params: SamplingParams, choice: int) -> SamplingParams:
    """`params` with a seed for this choice, if the request has one; choice 0 keeps it."""
    if params.seed is None or choice == 0:
        return params
    return msgspec.structs.replace(params, seed=_mix(~params.seed, choice))


def sample_and_advance(logits: mx.array, rows: list[SequenceSampler]) -> mx.array:
    """`sample`, and advance every row by its token."""
    tokens = sample(logits, rows)
    for i, row in enumerate(rows):
        row.advance(tokens[i])
    return tokens


def sample(logits: mx.array, rows: list[SequenceSampler]) -> mx.array:
    """Token ids or `NO_TOKEN`, (rows,), from `logits`, (rows, vocabulary)."""
    tokens, _ = _greedy(logits)
    others = [i for i, row in enumerate(rows) if not row.is_plainly_greedy]
    if others:
        scores = mx.stack([_adjust(logits[i].astype(mx.float32), rows[i]) for i in others])
        tokens[mx.array(others)] = _sample(scores, [rows[i] for i in others])
    return tokens


def _adjust(scores: mx.array, row: SequenceSampler) -> mx.array:
    """`row.adjust(scores)`, (vocabulary,); NaN if it fails, which ends this row alone."""
    try:
        return row.adjust(scores)
    except Exception:
        logger.exception("adjusting a row's scores failed")
        return mx.full(scores.shape, mx.nan)


def _greedy(scores: mx.array) -> tuple[mx.array, mx.array]:
    """The best token of each row, (rows,), `NO_TOKEN` if there is none; its score, (rows, 1)."""
    ids = mx.argmax(scores, axis=-1, keepdims=True).astype(mx.int32)
    best = mx.take_along_axis(scores, ids, axis=-1)
    return mx.where(mx.isfinite(best), ids, NO_TOKEN)[:, 0], best


def _sample(scores: mx.array, rows: list[SequenceSampler]) -> mx.array:
    """One token for each row of `scores` (rows, vocabulary): the best, or one by chance."""
    greedy, best = _greedy(scores)
    if not any(row.temperature for row in rows):
        return greedy
    temperatures = mx.array([[row.temperature] for row in rows])
    scaled = (scores - best) / mx.maximum(temperatures, _MIN_TEMPERATURE)
    likely = _keep_likely(scaled, rows)
    noise = mx.stack([mx.random.gumbel((scores.shape[-1],), key=row.key()) for row in rows])
    sampled = mx.argmax(likely + noise, axis=-1).astype(mx.int32)
    is_sampled = mx.logical_and(temperatures[:, 0] > 0, greedy != NO_TOKEN)
    return mx.where(is_sampled, sampled, greedy)


def _keep_likely(scores: mx.array, rows: list[SequenceSampler]) -> mx.array:
    """`scores` with minus infinity where top_k, top_p or min_p leave a token out.

    Nucleus sampling (Holtzman et al. 2020): a token stays if the mass above it is below
    `top_p`, so at least the likeliest one does. min_p (Nguyen et al. 2024): a token stays if
    it is at least `min_p` times as likely as the likeliest.
    """
    vocabulary_size = scores.shape[-1]
    top_k = [row.top_k for row in rows]
    top_p, min_p = [row.top_p for row in rows], [row.min_p for row in rows]
    if min(top_k) >= vocabulary_size and min(top_p) > 1 and max(min_p) <= 0:
        return scores
    order = mx.argsort(-scores, axis=-1)
    ranked = mx.take_along_axis(scores, order, axis=-1)
    probs = mx.softmax(ranked, axis=-1)
    is_kept = mx.arange(vocabulary_size)[None] < mx.array(top_k)[:, None]
    is_kept &= mx.cumsum(probs, axis=-1) - probs < mx.array(top_p)[:, None]
    is_kept &= probs >= mx.array(min_p)[:, None] * probs[:, :1]
    return mx.put_along_axis(scores, order, mx.where(is_kept, ranked, -mx.inf), axis=-1)


def _mix(seed: int, step: int) -> int:
    """64 random bits for one token (SplitMix64's finalizer, Steele et al. 2014)."""
    bits = (seed + step * 0x9E3779B97F4A7C15) & _MASK_64
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & _MASK_64
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & _MASK_64
    return bits ^ bits >> 31


# ---- log probabilities ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LazyLogprobs:
    """Log probabilities of one step's tokens, for the rows that ask for them.

    chosen: (rows, 1), of the sampled token. top_ids, top_logprobs: (rows, largest of `num_top`),
    the likeliest first.
    """

    seq_ids: tuple[SeqId, ...]
    num_top: tuple[int, ...]
    sampled: mx.array
    top_ids: mx.array
    top_logprobs: mx.array

    @property
    def arrays(self) -> list[mx.array]:
        return [self.sampled, self.top_ids, self.top_logprobs]

    def read(self) -> Iterator[tuple[SeqId, TokenLogprobs]]:
        """Each row's log probabilities, read from the device."""
        sampled, ids, logprobs = map(to_numpy, self.arrays)
        for row, (row_id, count) in enumerate(zip(self.seq_ids, self.num_top, strict=True)):
            top = zip(ids[row, :count].tolist(), logprobs[row, :count].tolist(), strict=True)
            yield row_id, TokenLogprobs(float(sampled[row, 0]), tuple(top))


def compute_logprobs(
    logits: mx.array, tokens: mx.array, asking: Sequence[tuple[int, SeqId, int]]
) -> list[LazyLogprobs]:
    """Log probabilities of `tokens` (rows,) under `logits` (rows, vocabulary).

    `asking` lists (row, its id, number of alternatives); empty gives nothing.
    """
    if not asking:
        return []
    rows = mx.array([row for row, _, _ in asking])
    row_logits = logits[rows].astype(mx.float32)
    logprobs = row_logits - mx.logsumexp(row_logits, axis=-1, keepdims=True)
    max_count = max(count for _, _, count in asking)
    top_ids = _likeliest(logprobs, max_count)
    return [
        LazyLogprobs(
            seq_ids=tuple(row_id for _, row_id, _ in asking),
            num_top=tuple(count for _, _, count in asking),
            sampled=mx.take_along_axis(logprobs, tokens[rows][:, None], axis=-1),
            top_ids=top_ids,
            top_logprobs=mx.take_along_axis(logprobs, top_ids, axis=-1),
        )
    ]


def _likeliest(logprobs: mx.array, count: int) -> mx.array:
    """Ids of the `count` likeliest tokens, (rows, count), in order; of all if there are fewer.

    Sorts these alone: sorting a whole vocabulary takes a CPU 30 ms a row. Of equal scores at
    the top, which half precision often has, a greedy row's token comes first.
    """
    count = min(count, logprobs.shape[-1])
    if count == 0:
        return mx.zeros((len(logprobs), 0), dtype=mx.int32)
    greedy = mx.argmax(logprobs, axis=-1, keepdims=True)
    ranks = mx.put_along_axis(-logprobs, greedy, mx.array(-mx.inf), axis=-1)
    ids = mx.argpartition(ranks, count - 1, axis=-1)[:, :count]
    order = mx.argsort(mx.take_along_axis(ranks, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1)
