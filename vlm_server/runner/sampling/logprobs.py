"""Log probabilities of sampled tokens, for the rows that ask. Knows logits; samples nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from vlm_server.interfaces import SeqId, TokenLogprobs
from vlm_server.runner.device.arrays import read


@dataclass(frozen=True, slots=True)
class LazyLogprobs:
    """Log probabilities of some rows' tokens of one step.

    chosen: (rows, 1) log probability of the sampled token. top_ids, top_logprobs: (rows, most),
    the likeliest first, where `most` is the largest of `num_top`.
    """

    seq_ids: tuple[SeqId, ...]
    num_top: tuple[int, ...]
    chosen: mx.array
    top_ids: mx.array
    top_logprobs: mx.array

    @property
    def arrays(self) -> list[mx.array]:
        return [self.chosen, self.top_ids, self.top_logprobs]

    def read(self) -> Iterator[tuple[SeqId, TokenLogprobs]]:
        """Each row's, on the host: waits for the device."""
        chosen, ids, logprobs = map(read, self.arrays)
        for row, (row_id, count) in enumerate(zip(self.seq_ids, self.num_top, strict=True)):
            top = zip(ids[row, :count].tolist(), logprobs[row, :count].tolist(), strict=True)
            yield row_id, TokenLogprobs(float(chosen[row, 0]), tuple(top))


def compute_logprobs(
    logits: mx.array, tokens: mx.array, asking: Sequence[tuple[int, SeqId, int]]
) -> list[LazyLogprobs]:
    """Log probabilities of `tokens` (rows,) under `logits` (rows, vocabulary).

    `asking` lists (row, its id, number of alternatives); empty gives nothing.
    """
    if not asking:
        return []
    rows = mx.array([row for row, _, _ in asking])
    wanted = logits[rows].astype(mx.float32)
    logprobs = wanted - mx.logsumexp(wanted, axis=-1, keepdims=True)
    most = max(count for _, _, count in asking)
    top_ids = _likeliest(logprobs, most)
    return [
        LazyLogprobs(
            seq_ids=tuple(row_id for _, row_id, _ in asking),
            num_top=tuple(count for _, _, count in asking),
            chosen=mx.take_along_axis(logprobs, tokens[rows][:, None], axis=-1),
            top_ids=top_ids,
            top_logprobs=mx.take_along_axis(logprobs, top_ids, axis=-1),
        )
    ]


def _likeliest(logprobs: mx.array, count: int) -> mx.array:
    """Ids of the `count` likeliest tokens, (rows, count), in order; of all if there are fewer.

    Sorts these alone: sorting a whole vocabulary takes a CPU 30 ms a row. Of equals at the top,
    as half precision often has them, a greedy row's token is the first.
    """
    count = min(count, logprobs.shape[-1])
    if count == 0:
        return mx.zeros((len(logprobs), 0), dtype=mx.int32)
    greedy = mx.argmax(logprobs, axis=-1, keepdims=True)
    ranks = mx.put_along_axis(-logprobs, greedy, mx.array(-mx.inf), axis=-1)
    ids = mx.argpartition(ranks, count - 1, axis=-1)[:, :count]
    order = mx.argsort(mx.take_along_axis(ranks, ids, axis=-1), axis=-1)
    return mx.take_along_axis(ids, order, axis=-1)
