"""All sequences that decode together, and their batched KV cache.

Runs one step ahead of what it reports: `launch` begins a step on the tokens that the last one drew,
and only `result` reads those tokens, so the device works while the host reads them. The first token
of a sequence is waited for, and reported when it joins. Sequences that follow a grammar need those
tokens before they draw: then the host reads them, and finds what is allowed next, between launching
the model and launching the draw.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_server.cache.prompt_key import PromptKey
from vlm_server.ports import PreparedPrompt, SeqId, TokenScore
from vlm_server.runner.kv.batch_cache import filtered, joined
from vlm_server.runner.kv.segments import SequenceState, snapshot
from vlm_server.runner.sampling.logprobs import Scores, score
from vlm_server.runner.sampling.sampler import SequenceSampler, choice_params, sample
from vlm_server.runner.text.mrope import DecodePositions
from vlm_server.runner.text.prefill import Prefill


@dataclass(slots=True)
class _Sequence:
    """`position` is that of the next token, before the family's rope delta.

    `token_ids` are those of the answer that the cache holds. `is_reported` is said of the token
    that was drawn last.
    """

    id: SeqId
    sampler: SequenceSampler
    prompt: PreparedPrompt
    position: int
    token_ids: list[int] = field(default_factory=list)
    is_reported: bool = True


Sampled = tuple[dict[SeqId, int], dict[SeqId, TokenScore]]
"""Tokens by sequence, and the scores of those that were asked for."""


class DecodeBatch:
    """Sequences come with their own cache, those of a request together; each leaves at any step."""

    def __init__(
        self, language_model: Any, eos_token_ids: frozenset[int], positions: DecodePositions
    ) -> None:
        self._language_model = language_model
        self._eos_token_ids = eos_token_ids
        self._positions = positions
        self._seqs: list[_Sequence] = []
        self._cache: list[Any] = []
        self._tokens: mx.array | None = None
        self._scores: list[Scores] = []
        self._unread: tuple[mx.array, list[Scores]] | None = None
        """What the step before the launched one drew."""

    @property
    def seq_ids(self) -> tuple[SeqId, ...]:
        return tuple(seq.id for seq in self._seqs)

    def join(self, request_id: str, prefill: Prefill, logits: mx.array) -> Sampled:
        """Add a sequence for each choice of a prefilled request; their first tokens.

        Those are drawn from `logits` (1, vocabulary). Each sequence gets a copy of the prompt's
        cache, or the cache itself if it is alone. The running sequences are left as they were if
        this fails. See `result` for `NO_TOKEN`.
        """
        seqs = self._new_seqs(request_id, prefill, logits.shape[-1])
        first, scores = _draw(mx.broadcast_to(logits, (len(seqs), logits.shape[-1])), seqs)
        cache = joined(self._cache, len(self._seqs), prefill.cache, len(seqs))
        tokens = first if self._tokens is None else mx.concatenate([self._tokens, first])
        mx.eval(first, tokens, [layer.state for layer in cache])
        self._cache, self._tokens = cache, tokens
        self._seqs += seqs
        drawn = zip((seq.id for seq in seqs), np.array(first).tolist(), strict=True)
        return dict(drawn), _read(scores)

    def runs_on(self, cache: list[Any]) -> bool:
        """Whether this is the cache of the only sequence here, not one that was copied."""
        return self._cache is cache

    def is_stuck(self, seq_id: SeqId) -> bool:
        """Whether a sequence's grammar does not let it go on."""
        return any(seq.id == seq_id and seq.sampler.is_stuck for seq in self._seqs)

    def state_of(self, seq_id: SeqId) -> tuple[PromptKey, SequenceState, str] | None:
        """All tokens of a sequence that its cache holds, their KV, and its salt.

        None if it has left, or if nobody can reuse the KV of its prompt. The KV is to be read
        before the next launch, and before any sequence leaves.
        """
        for i, seq in enumerate(self._seqs):
            if seq.id == seq_id and not seq.prompt.is_atomic:
                return *self._state_of(i, seq), seq.prompt.cache_salt
        return None

    def leave(self, seq_ids: Collection[SeqId]) -> None:
        """Drop sequences, and what they were about to draw. Those not here are no error."""
        staying = [i for i, seq in enumerate(self._seqs) if seq.id not in seq_ids]
        if len(staying) == len(self._seqs):
            return
        self._seqs = [self._seqs[i] for i in staying]
        if self._tokens is None or not staying:
            self._cache, self._tokens, self._scores = [], None, []
            return
        self._cache = filtered(self._cache, staying)
        self._tokens = self._tokens[mx.array(staying)]

    def launch(self) -> None:
        """Begin the next step of all sequences. Each launch is followed by one `result`."""
        if self._tokens is None:
            return
        drawn, scores = self._tokens, self._scores
        self._tokens, self._scores = self._launch(drawn)
        self._unread = drawn, scores

    def result(self) -> Sampled:
        """The tokens of the step before the launched one, but for those that `join` reported.

        `NO_TOKEN` is that of a sequence which has to leave: its scores are not numbers, or its
        grammar is stuck.
        """
        if self._unread is None:
            return {}, {}
        (drawn, scores), self._unread = self._unread, None
        tokens = dict[SeqId, int]()
        for seq, token in zip(self._seqs, np.array(drawn).tolist(), strict=True):
            seq.token_ids.append(token)
            if not seq.is_reported:
                tokens[seq.id] = token
            seq.is_reported = False
        return tokens, {seq: score for seq, score in _read(scores).items() if seq in tokens}

    def _state_of(self, i: int, seq: _Sequence) -> tuple[PromptKey, SequenceState]:
        answer = np.array(seq.token_ids, dtype=np.int32)
        token_ids = np.concatenate([seq.prompt.token_ids, answer])
        now = snapshot(self._cache, i if len(self._seqs) > 1 else None)
        state = SequenceState(self._cache, {len(token_ids): now}, i)
        return PromptKey(token_ids, seq.prompt.spans), state

    def _new_seqs(self, request_id: str, prefill: Prefill, vocabulary_size: int) -> list[_Sequence]:
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
            _Sequence(SeqId(request_id, choice), sampler, prefill.prompt, prefill.prompt.num_tokens)
            for choice, sampler in enumerate(samplers)
        ]

    def _launch(self, tokens: mx.array) -> tuple[mx.array, list[Scores]]:
        has_positions = self._positions is not DecodePositions.NONE
        kwargs = {"position_ids": self._position_ids()} if has_positions else {}
        output = self._language_model(tokens[:, None], cache=self._cache, **kwargs)
        logits = output.logits[:, -1]
        self._follow_grammars(tokens, logits)
        following, scores = _draw(logits, self._seqs)
        state = _counters(self._cache)
        state += [array for seq in self._seqs for array in seq.sampler.state]
        state += [array for each in scores for array in each.arrays]
        mx.async_eval(following, state)  # type: ignore[no-untyped-call]
        for seq in self._seqs:
            seq.position += 1
        return following, scores

    def _follow_grammars(self, tokens: mx.array, logits: mx.array) -> None:
        """Find what may be drawn after `tokens`, while the device works on `logits`."""
        guided = [(i, seq) for i, seq in enumerate(self._seqs) if seq.sampler.follows_grammar]
        if not guided:
            return
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        drawn = np.array(tokens).tolist()
        for i, seq in guided:
            seq.sampler.follow(drawn[i])

    def _position_ids(self) -> mx.array:
        """The M-RoPE position of each sequence's next token: see `DecodePositions`."""
        positions = mx.array([[seq.position + seq.prompt.rope_delta] for seq in self._seqs])
        if self._positions is DecodePositions.ONE:
            return positions
        return mx.broadcast_to(positions[None], (3, *positions.shape))


def _draw(logits: mx.array, seqs: list[_Sequence]) -> tuple[mx.array, list[Scores]]:
    """The next token of each sequence, and the scores of those that ask."""
    tokens = sample(logits, [seq.sampler for seq in seqs])
    asking = [
        (i, seq.id, count)
        for i, seq in enumerate(seqs)
        if (count := seq.sampler.params.logprobs) is not None
    ]
    return tokens, score(logits, tokens, asking)


def _read(scores: list[Scores]) -> dict[SeqId, TokenScore]:
    return dict(entry for each in scores for entry in each.read())


def _counters(cache: list[Any]) -> list[mx.array]:
    """Small arrays that layers count in: left lazy, each would grow a graph of every step."""
    found = (vars(layer).get("offset") for layer in cache)
    return [counter for counter in found if isinstance(counter, mx.array)]
