"""All rows that decode together. Knows the batched KV cache; knows no request's text or end.

Runs one step ahead of what it reports: `step` launches a step on the tokens that the last
one drew, and only then reads those tokens, so the device works while the host reads them. The
first token of a row is waited for, and reported when it joins.
Rows that follow a grammar need those tokens before they draw: then the host reads them, and
finds what is allowed next, between launching the model and launching the draw.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_server.cache.prompt_key import PromptKey
from vlm_server.ports import PreparedPrompt, SeqId, TokenScore
from vlm_server.runner.kv.batch_cache import joined, kept
from vlm_server.runner.kv.segments import SequenceState, snapshot
from vlm_server.runner.sampling.logprobs import Scores, score
from vlm_server.runner.sampling.sampler import SequenceSampler, choice_params, sample
from vlm_server.runner.text.mrope import DecodePositions
from vlm_server.runner.text.prefill import Prefill


@dataclass(slots=True)
class _Row:
    """`position` is that of the row's next token, before the family's rotary delta.

    `token_ids` are those of the answer that the cache holds. `is_reported` is said of the token
    that was drawn last.
    """

    id: SeqId
    sampler: SequenceSampler
    prompt: PreparedPrompt
    position: int
    token_ids: list[int] = field(default_factory=list)
    is_reported: bool = True


Drawn = tuple[dict[SeqId, int], dict[SeqId, TokenScore]]
"""Tokens by row, and the scores of those that were asked for."""


class DecodeBatch:
    """Rows come with their own cache, those of one request together; each leaves at any step."""

    def __init__(
        self, language_model: Any, eos_token_ids: frozenset[int], positions: DecodePositions
    ) -> None:
        self._language_model = language_model
        self._eos_token_ids = eos_token_ids
        self._positions = positions
        self._rows: list[_Row] = []
        self._cache: list[Any] = []
        self._tokens: mx.array | None = None
        self._scores: list[Scores] = []

    @property
    def seq_ids(self) -> tuple[SeqId, ...]:
        return tuple(row.id for row in self._rows)

    def join(self, request_id: str, prefill: Prefill, logits: mx.array) -> Drawn:
        """Add a row for each choice of a prefilled request, `sampling.n`; their first tokens.

        Those are drawn from `logits` (1, vocabulary), and each row gets a copy of the prompt's
        cache, or the cache itself if it is alone. The rows that run are left as they were if
        this fails. See `step` for `NO_TOKEN`.
        """
        rows = self._new_rows(request_id, prefill, logits.shape[-1])
        first, scores = _draw(mx.broadcast_to(logits, (len(rows), logits.shape[-1])), rows)
        cache = joined(self._cache, len(self._rows), prefill.cache, len(rows))
        tokens = first if self._tokens is None else mx.concatenate([self._tokens, first])
        mx.eval(first, tokens, [layer.state for layer in cache])
        self._cache, self._tokens = cache, tokens
        self._rows += rows
        drawn = zip((row.id for row in rows), np.array(first).tolist(), strict=True)
        return dict(drawn), _read(scores)

    def runs_on(self, cache: list[Any]) -> bool:
        """Whether this is the cache of the row that is alone here, not one that was copied."""
        return self._cache is cache

    def is_stuck(self, row_id: SeqId) -> bool:
        """Whether a row's grammar does not let it go on."""
        return any(row.id == row_id and row.sampler.is_stuck for row in self._rows)

    def state_of(self, row_id: SeqId) -> tuple[PromptKey, SequenceState, str] | None:
        """All tokens of a row that its cache holds, their KV and its salt.

        None if it has left, or if nobody can go on from its prompt. The KV is to be read before
        the next step, and before any row leaves.
        """
        for i, row in enumerate(self._rows):
            if row.id == row_id and not row.prompt.is_atomic:
                return *self._state_of(i, row), row.prompt.cache_salt
        return None

    def leave(self, rows: Collection[SeqId]) -> None:
        """Drop rows, and what they were about to draw. Those that are not here are no error."""
        staying = [i for i, row in enumerate(self._rows) if row.id not in rows]
        if len(staying) == len(self._rows):
            return
        self._rows = [self._rows[i] for i in staying]
        if self._tokens is None or not staying:
            self._cache, self._tokens, self._scores = [], None, []
            return
        self._cache = kept(self._cache, staying)
        self._tokens = self._tokens[mx.array(staying)]

    def step(self) -> Drawn:
        """Launch the next step for all rows; the tokens of the step before that are news.

        `NO_TOKEN` is that of a row which has to leave: its scores are not numbers, or its
        grammar is stuck.
        """
        if self._tokens is None:
            return {}, {}
        drawn, scores = self._tokens, self._scores
        self._tokens, self._scores = self._launch(drawn)
        tokens = dict[SeqId, int]()
        for row, token in zip(self._rows, np.array(drawn).tolist(), strict=True):
            row.token_ids.append(token)
            if not row.is_reported:
                tokens[row.id] = token
            row.is_reported = False
        return tokens, {row: score for row, score in _read(scores).items() if row in tokens}

    def _state_of(self, i: int, row: _Row) -> tuple[PromptKey, SequenceState]:
        answer = np.array(row.token_ids, dtype=np.int32)
        token_ids = np.concatenate([row.prompt.token_ids, answer])
        now = snapshot(self._cache, i if len(self._rows) > 1 else None)
        state = SequenceState(self._cache, {len(token_ids): now}, i)
        return PromptKey(token_ids, row.prompt.spans), state

    def _new_rows(self, request_id: str, prefill: Prefill, vocabulary_size: int) -> list[_Row]:
        samplers = [
            SequenceSampler(
                choice_params(prefill.sampling, choice),
                prefill.prompt.token_ids,
                self._eos_token_ids,
                vocabulary_size,
                prefill.grammar.begin() if prefill.grammar else None,
            )
            for choice in range(prefill.sampling.n)
        ]
        return [
            _Row(SeqId(request_id, choice), sampler, prefill.prompt, prefill.prompt.num_tokens)
            for choice, sampler in enumerate(samplers)
        ]

    def _launch(self, tokens: mx.array) -> tuple[mx.array, list[Scores]]:
        has_positions = self._positions is not DecodePositions.NONE
        kwargs = {"position_ids": self._position_ids()} if has_positions else {}
        output = self._language_model(tokens[:, None], cache=self._cache, **kwargs)
        logits = output.logits[:, -1]
        self._follow_grammars(tokens, logits)
        following, scores = _draw(logits, self._rows)
        behind = _counters(self._cache)
        behind += [array for row in self._rows for array in row.sampler.state]
        behind += [array for each in scores for array in each.arrays]
        mx.async_eval(following, behind)  # type: ignore[no-untyped-call]
        for row in self._rows:
            row.position += 1
        return following, scores

    def _follow_grammars(self, tokens: mx.array, logits: mx.array) -> None:
        """Find what may be drawn after `tokens`, while the device works on `logits`."""
        guided = [(i, row) for i, row in enumerate(self._rows) if row.sampler.follows_grammar]
        if not guided:
            return
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        drawn = np.array(tokens).tolist()
        for i, row in guided:
            row.sampler.follow(drawn[i])

    def _position_ids(self) -> mx.array:
        """The M-RoPE position of each row's next token: see `DecodePositions`."""
        positions = mx.array([[row.position + row.prompt.rope_delta] for row in self._rows])
        if self._positions is DecodePositions.ONE:
            return positions
        return mx.broadcast_to(positions[None], (3, *positions.shape))


def _draw(logits: mx.array, rows: list[_Row]) -> tuple[mx.array, list[Scores]]:
    """The next token of each row, and the scores of those that ask."""
    tokens = sample(logits, [row.sampler for row in rows])
    asking = [
        (i, row.id, count)
        for i, row in enumerate(rows)
        if (count := row.sampler.params.logprobs) is not None
    ]
    return tokens, score(logits, tokens, asking)


def _read(scores: list[Scores]) -> dict[SeqId, TokenScore]:
    return dict(entry for each in scores for entry in each.read())


def _counters(cache: list[Any]) -> list[mx.array]:
    """Small arrays that layers count in: left lazy, each would grow a graph of every step."""
    found = (vars(layer).get("offset") for layer in cache)
    return [counter for counter in found if isinstance(counter, mx.array)]
