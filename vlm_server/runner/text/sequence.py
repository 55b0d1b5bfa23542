"""The sequences of a decode batch, and the tokens that were sampled for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from vlm_server.interfaces import DraftCounts, PreparedPrompt, SeqId, TokenLogprobs
from vlm_server.runner import sampling
from vlm_server.runner.ranks import Ranks
from vlm_server.runner.sampling import LazyLogprobs, SequenceSampler
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

    def num_useful_drafts(self, most: int) -> int:
        """The number of tokens beyond the next that the answer may have, up to `most`."""
        limit = self.sampler.params.max_tokens
        return most if limit is None else min(most, max(limit - len(self.token_ids) - 2, 0))

    def append(self, token_ids: list[int]) -> None:
        """Hand the tokens that were sampled last to drafter and grammar."""
        self.is_known = True
        self.sampler.follow(token_ids)
        if self.drafter is not None:
            for token_id in token_ids:
                self.drafter.append(token_id)


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
    tokens = sampling.sample_and_advance(logits, [seq.sampler for seq in seqs])
    if ranks is not None:
        tokens = ranks.share(tokens)
    return tokens, logprobs_of(logits, tokens, seqs)


def logprobs_of(
    logits: mx.array, tokens: mx.array, seqs: Sequence[DecodingSequence]
) -> list[LazyLogprobs]:
    """The logprobs of `tokens`, (rows,), in the rows of those `seqs` that ask for them."""
    asking = [
        (row, seq.id, count)
        for row, seq in enumerate(seqs)
        if (count := seq.sampler.params.logprobs) is not None
    ]
    return sampling.compute_logprobs(logits, tokens, asking)


def by_sequence(logprobs: list[LazyLogprobs]) -> dict[SeqId, list[TokenLogprobs]]:
    """Each sequence's logprobs, in the order of its tokens, read from the device."""
    found = dict[SeqId, list[TokenLogprobs]]()
    for seq_id, entry in (entry for each in logprobs for entry in each.read()):
        found.setdefault(seq_id, []).append(entry)
    return found
