"""The sequences of a decode batch, and the tokens that were sampled for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_server.cache.prompt_key import PromptKey
from vlm_server.interfaces import DraftCounts, PreparedPrompt, SeqId, TokenLogprobs
from vlm_server.runner import sampling
from vlm_server.runner.decode.drafts import Drafter
from vlm_server.runner.kv.prompt_kv import PrefixEntry, PromptKV
from vlm_server.runner.kv.segments import LayerStates, SequenceState
from vlm_server.runner.ranks import Ranks
from vlm_server.runner.sampling import LazyLogprobs, SequenceSampler, choice_params


@dataclass(slots=True)
class DecodingSequence:
    """One choice of a request, from its first token to its last."""

    id: SeqId
    sampler: SequenceSampler
    prompt: PreparedPrompt
    position: int
    """The next token's position, before the family's rope delta is added."""
    drafter: Drafter | None
    token_ids: list[int] = field(default_factory=list)
    """The answer's tokens that the cache holds."""
    newest_token_reported: bool = True
    """Whether the newest token is in a `Sampled`."""
    newest_token_followed: bool = False
    """Whether drafter and grammar have the newest token."""

    def num_useful_drafts(self, limit: int) -> int:
        """The number of tokens beyond the next that the answer may have, up to `limit`."""
        longest = self.sampler.params.max_tokens
        return limit if longest is None else min(limit, max(longest - len(self.token_ids) - 2, 0))

    def follow(self, token_ids: list[int]) -> None:
        """Hand the newest tokens to drafter and grammar. They are not in `token_ids` yet."""
        self.newest_token_followed = True
        self.sampler.follow(token_ids)
        if self.drafter is not None:
            for token_id in token_ids:
                self.drafter.append(token_id)

    def prefix_entry(self, cache: list[Any], row: int, layer_states: LayerStates) -> PrefixEntry:
        """The prefix cache's entry of the tokens that `cache` holds of this sequence, at `row`.

        layer_states: a `snapshot` of the row.
        """
        answer = np.fromiter(self.token_ids, dtype=np.int32)
        token_ids = np.concatenate([self.prompt.token_ids, answer])
        snapshots = {len(token_ids): layer_states}
        state = SequenceState(cache, snapshots, row)
        key = PromptKey(token_ids, self.prompt.spans)
        return PrefixEntry(key, state, self.prompt.prefix_salt)


def new_sequences(
    request_id: str,
    prompt_kv: PromptKV,
    eos_token_ids: frozenset[int],
    vocabulary_size: int,
    *,
    verifies_drafts: bool,
) -> list[DecodingSequence]:
    """A sequence for each choice of a prefilled request."""
    prompt, count = prompt_kv.prompt, prompt_kv.sampling.n
    matchers = prompt.grammar.begin(count) if prompt.grammar else [None] * count
    return [
        DecodingSequence(
            SeqId(request_id, choice),
            SequenceSampler(
                choice_params(prompt_kv.sampling, choice),
                prompt.token_ids,
                eos_token_ids,
                vocabulary_size,
                matcher,
            ),
            prompt,
            prompt.num_tokens,
            Drafter(prompt.token_ids, prompt.prediction) if verifies_drafts else None,
        )
        for choice, matcher in enumerate(matchers)
    ]


@dataclass(slots=True)
class NewTokens:
    """The newest token of each sequence, (sequences,), and the logprobs asked for; all lazy."""

    tokens: mx.array
    logprobs: list[LazyLogprobs]

    def keep(self, rows: list[int]) -> None:
        """Keep the tokens of these rows; `logprobs` may still have more."""
        self.tokens = self.tokens[mx.array(rows)]


@dataclass(slots=True)
class Sampled:
    """The tokens of a step by sequence, the logprobs asked for, and counts of drafts."""

    tokens: dict[SeqId, list[int]] = field(default_factory=dict)
    logprobs: dict[SeqId, list[TokenLogprobs]] = field(default_factory=dict)
    drafts: dict[SeqId, DraftCounts] = field(default_factory=dict)

    def add(self, other: Sampled) -> None:
        """Add the tokens of another batch."""
        self.tokens |= other.tokens
        self.logprobs |= other.logprobs
        self.drafts |= other.drafts


def sample_next(
    logits: mx.array, seqs: list[DecodingSequence], ranks: Ranks | None
) -> tuple[mx.array, list[LazyLogprobs]]:
    """The next token of each sequence, and the logprobs asked for.

    With several `ranks`, all take the tokens of rank 0.
    """
    tokens = sampling.sample_and_advance(logits, [seq.sampler for seq in seqs])
    if ranks is not None:
        tokens = ranks.share(tokens)
    return tokens, logprobs_of(logits, tokens, seqs)


def logprobs_of(
    logits: mx.array, tokens: mx.array, seqs: Sequence[DecodingSequence]
) -> list[LazyLogprobs]:
    """The logprobs of `tokens`, (rows,), where the row's sequence asks for them."""
    asking = [
        (row, seq.id, count)
        for row, seq in enumerate(seqs)
        if (count := seq.sampler.params.logprobs) is not None
    ]
    return sampling.compute_logprobs(logits, tokens, asking)


def by_sequence(logprobs: list[LazyLogprobs]) -> dict[SeqId, list[TokenLogprobs]]:
    """Each sequence's logprobs in the order of its tokens; waits for the device."""
    logprobs_by_seq = dict[SeqId, list[TokenLogprobs]]()
    for seq_id, entry in (entry for step in logprobs for entry in step.read()):
        logprobs_by_seq.setdefault(seq_id, []).append(entry)
    return logprobs_by_seq
