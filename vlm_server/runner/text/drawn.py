"""Tokens that were drawn: on the device, where the host has not read them yet, and as reported."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from vlm_server.interfaces import DraftCounts, SeqId, TokenLogprobs
from vlm_server.runner.ranks import Ranks
from vlm_server.runner.sampling.logprobs import LazyLogprobs, compute_logprobs
from vlm_server.runner.sampling.sampler import sample
from vlm_server.runner.text.sequence import DecodingSequence


@dataclass(frozen=True, slots=True)
class Unread:
    """What was drawn in the step before, for the sequences that were here then."""

    seqs: list[DecodingSequence]
    tokens: mx.array
    logprobs: list[LazyLogprobs]


@dataclass(slots=True)
class Sampled:
    """Tokens by sequence, the logprobs of those that were asked for, and what became of drafts."""

    tokens: dict[SeqId, list[int]] = field(default_factory=dict)
    logprobs: dict[SeqId, list[TokenLogprobs]] = field(default_factory=dict)
    drafts: dict[SeqId, DraftCounts] = field(default_factory=dict)

    def add(self, other: Sampled) -> None:
        """Take in what another batch brought."""
        self.tokens |= other.tokens
        self.logprobs |= other.logprobs
        self.drafts |= other.drafts


def draw_next(
    logits: mx.array, seqs: list[DecodingSequence], ranks: Ranks | None
) -> tuple[mx.array, list[LazyLogprobs]]:
    """The next token of each sequence, and the logprobs of those that ask.

    Where there are several `ranks`, what rank 0 drew is the next token of all.
    """
    tokens = sample(logits, [seq.sampler for seq in seqs])
    if ranks is not None:
        tokens = ranks.share(tokens)
    asking = [
        (i, seq.id, count)
        for i, seq in enumerate(seqs)
        if (count := seq.sampler.params.logprobs) is not None
    ]
    return tokens, compute_logprobs(logits, tokens, asking)


def by_sequence(logprobs: list[LazyLogprobs]) -> dict[SeqId, list[TokenLogprobs]]:
    """On the host: waits for the device."""
    return {seq_id: [entry] for each in logprobs for seq_id, entry in each.read()}
