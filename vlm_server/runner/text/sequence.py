"""The sequences of a decode batch, and the tokens that were sampled for them."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from vlm_server.interfaces import DraftCounts, PreparedPrompt, SeqId, TokenLogprobs
from vlm_server.runner.ranks import Ranks
from vlm_server.runner.sampling import (
    LazyLogprobs,
    SequenceSampler,
    compute_logprobs,
    sample_and_advance,
)
from vlm_server.runner.text.drafts import Drafter


@dataclass(slots=True)
class DecodingSequence:
    """One choice of a request, from its first token to its last.

    position: of the next token, before the family's rope delta. token_ids: of the answer, those
    that the cache holds. is_reported, is_known: whether the token that was sampled last is in a
    `Sampled`, and whether drafter and grammar have it.
    """

    id: SeqId
    sampler: SequenceSampler
    prompt: PreparedPrompt
    position: int
    drafter: Drafter | None
    token_ids: list[int] = field(default_factory=list)
    is_reported: bool = True
    is_known: bool = False

    @property
    def num_useful_drafts(self) -> int | None:
        """The number of tokens beyond the next that the answer may have; None without a limit."""
        most = self.sampler.params.max_tokens
        return None if most is None else max(most - len(self.token_ids) - 2, 0)

    def append(self, token_ids: list[int]) -> None:
        """Hand the tokens that were sampled last to drafter and grammar."""
        self.is_known = True
        self.sampler.follow(token_ids)
        if self.drafter is not None:
            for token_id in token_ids:
                self.drafter.append(token_id)


@dataclass(frozen=True, slots=True)
class Unread:
    """Tokens, (sequences,), that were sampled in the step before, and are on the device."""

    seqs: list[DecodingSequence]
    tokens: mx.array
    logprobs: list[LazyLogprobs]


@dataclass(slots=True)
class Sampled:
    """Tokens by sequence, their logprobs where those were asked for, and counts of drafts."""

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
    """The next token of each sequence, and the logprobs of those that ask.

    Where there are several `ranks`, the tokens of rank 0 are those of all.
    """
    tokens = sample_and_advance(logits, [seq.sampler for seq in seqs])
    if ranks is not None:
        tokens = ranks.share(tokens)
    asking = [
        (i, seq.id, count)
        for i, seq in enumerate(seqs)
        if (count := seq.sampler.params.logprobs) is not None
    ]
    return tokens, compute_logprobs(logits, tokens, asking)


def by_sequence(logprobs: list[LazyLogprobs]) -> dict[SeqId, list[TokenLogprobs]]:
    """Each sequence's logprobs, read from the device."""
    return {seq_id: [entry] for each in logprobs for seq_id, entry in each.read()}
