"""Decode steps: plain ones, and wide ones, which verify drafts (Leviathan et al. 2023), losslessly.

In a wide step, the model gets each row's newest token and its drafts in one call. At each position
the row samples what it would have sampled there without drafts: a sample depends on seed, step,
earlier tokens and logits alone. While each sample equals its draft, the next position was computed
from correct tokens and is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import ArraysCache

from vlm_server.interfaces import DraftCounts, SeqId, TokenLogprobs
from vlm_server.runner.decode.sequence import DecodingSequence, by_sequence, logprobs_of
from vlm_server.runner.decode.speculation import DraftChoice
from vlm_server.runner.device.arrays import to_numpy
from vlm_server.runner.kv.batch_cache import SequenceLayer
from vlm_server.runner.model.chunks import StepOutput
from vlm_server.runner.model.state_modules import RecordedStates
from vlm_server.runner.ranks import Ranks
from vlm_server.runner.sampling import LazyLogprobs, SequenceSampler, sample


@dataclass(slots=True)
class PlainStep:
    """A step that appends one token to each sequence. logits: (sequences, vocabulary), lazy."""

    logits: mx.array

    def keep(self, rows: list[int]) -> None:
        """Keep the logits of these rows."""
        self.logits = self.logits[mx.array(rows)]


class WideStep:
    """A step of which `sample` and `result` are called once each, in this order."""

    def __init__(
        self,
        seqs: Sequence[DecodingSequence],
        output: StepOutput,
        choice: DraftChoice,
        cache: Sequence[Any],
        ranks: Ranks | None,
    ) -> None:
        """`output`: for the tokens of `token_ids_of`, with the logits of all.

        `cache`: the layers of the step, see `layers_of_step`. With several `ranks`, all take the
        samples of rank 0.
        """
        self.logits, self.hidden = output.logits, output.hidden
        self.choice = choice
        self.counts: dict[SeqId, DraftCounts] = {}
        """Numbers of drafts that were verified, and were right; after `result`."""
        self._seqs = seqs
        self._cache = cache
        self._ranks = ranks
        drafts = zip(seqs, choice.token_ids, strict=True)
        self._samplers = [_samplers(seq, ids) for seq, ids in drafts]
        """For each row, a sampler for its newest token and one for each of its drafts."""
        self._sampled: mx.array | None = None
        """(positions,): the samples of all rows, one row after another."""
        self._logprobs: list[LazyLogprobs] = []

    @property
    def width(self) -> int:
        return self.logits.shape[1]

    def sample(self) -> None:
        """Begin to sample at each position."""
        places = [
            (row, i) for row, samplers in enumerate(self._samplers) for i in range(len(samplers))
        ]
        rows, columns = (mx.array(side) for side in zip(*places, strict=True))
        logits = self.logits[rows, columns]
        self._sampled = sample(logits, [self._samplers[row][i] for row, i in places])
        if self._ranks is not None:
            self._sampled = self._ranks.share(self._sampled)
        self._logprobs = logprobs_of(logits, self._sampled, [self._seqs[row] for row, _ in places])
        mx.async_eval(self._sampled, [array for step in self._logprobs for array in step.arrays])  # type: ignore[no-untyped-call]

    def result(self) -> tuple[list[list[int]], dict[SeqId, list[TokenLogprobs]]]:
        """Each row's tokens up to the first that is not its draft, and the logprobs asked for.

        Cuts the rejected drafts off the cache, which does not hold the last token of each row yet.
        """
        assert self._sampled is not None
        sampled = iter(to_numpy(self._sampled).tolist())
        logprobs, rows = by_sequence(self._logprobs), []
        choice = zip(self.choice.token_ids, self.choice.are_trained, strict=True)
        for seq, (drafts, is_trained), samplers in zip(
            self._seqs, choice, self._samplers, strict=True
        ):
            tokens = [next(sampled) for _ in samplers]
            wrong = (i for i, draft in enumerate(drafts) if draft != tokens[i])
            num_right = next(wrong, len(drafts))
            rows.append(tokens[: num_right + 1])
            self.counts[seq.id] = DraftCounts(len(drafts), num_right, is_trained)
            seq.sampler = samplers[num_right]
            seq.sampler.advance(mx.array(tokens[num_right]))
            seq.position += num_right + 1
            if seq.id in logprobs:
                del logprobs[seq.id][num_right + 1 :]
        self._cut([len(tokens) for tokens in rows])
        return rows, logprobs

    def _cut(self, kept: list[int]) -> None:
        surplus = [self.width - count for count in kept]
        for layer in self._cache:
            if isinstance(layer, RecordedStates):
                layer.commit(kept, self.width)
            elif isinstance(layer, SequenceLayer):
                layer.trim(surplus[0])
            else:
                layer.cut(surplus)


def layers_of_step(cache: Sequence[Any]) -> list[Any]:
    """The layers of a step that verifies drafts: states are recorded, to be computed again."""
    return [RecordedStates(layer) if isinstance(layer, ArraysCache) else layer for layer in cache]


def token_ids_of(tokens: Sequence[int], width: int, drafts: Sequence[list[int]]) -> mx.array:
    """The input of a wide step, (sequences, width): newest token, drafts, and zeros as padding."""
    token_ids = np.zeros((len(tokens), width), dtype=np.int32)
    for row, (token, ids) in enumerate(zip(tokens, drafts, strict=True)):
        token_ids[row, : 1 + len(ids)] = [token, *ids]
    return mx.array(token_ids)


def _samplers(seq: DecodingSequence, drafts: Sequence[int]) -> list[SequenceSampler]:
    """Samplers of `seq` after its newest token, and after each of its drafts if all are right."""
    seq.sampler.take_mask()
    matcher = seq.sampler.matcher
    masks = [None] * len(drafts) if matcher is None else matcher.draft_masks()
    samplers = [seq.sampler]
    for token_id, mask in zip(drafts, masks, strict=False):
        samplers.append(samplers[-1].after(token_id, mask))
    return samplers
