"""Drafts of a batch by a draft head.

A head with KV needs a hidden state for each token. Steps keep them as *pending*, until the head
appends their tokens to its own layers: at once before it drafts, else many at a time, which costs
little. Of a head without KV, the newest states alone are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from vlm_server.runner.decode.sequence import DecodingSequence
from vlm_server.runner.decode.speculation import DraftByHead
from vlm_server.runner.device.arrays import to_numpy
from vlm_server.runner.drafters.block_head import BlockHead
from vlm_server.runner.drafters.draft_head import StepwiseHead
from vlm_server.runner.kv.batch_cache import RowsKVCache
from vlm_server.runner.kv.layers import buffers_of
from vlm_server.runner.loaded import LoadedModel

_MAX_PENDING = 128
"""Pending states of all rows, at most: as many tokens as the widest step has."""


class HeadDrafts:
    """The pending hidden states of a batch, whose layers are given in each call.

    A row with n of them lacks its last n - 1 tokens in the head's layers, if there are any, and the
    state for its newest token, which the model's layers do not have yet, is the last one. Without a
    head, nothing is pending, and no call does anything.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._states: list[mx.array] = []
        """Each (rows, tokens, hidden), of one step."""
        self._counts: list[list[int]] = []
        """For each of them, the number of each row's tokens that were kept."""

    @property
    def arrays(self) -> list[mx.array]:
        return self._states

    def add(self, states: mx.array | None, counts: list[int]) -> None:
        """Add the states of a step's tokens, (rows, tokens, hidden), `counts` of each row."""
        head = self._loaded.draft_head
        if head is None or states is None:
            return
        if head.num_layers:
            self._states.append(states)
            self._counts.append(counts)
            return
        if states.shape[1] > 1:
            states = states[mx.arange(len(counts)), mx.array(counts) - 1][:, None]
        self._states, self._counts = [states], [[1] * len(counts)]

    def join(self, states: Sequence[mx.array | None]) -> None:
        """Add rows with one pending state each, (rows, 1, hidden); `catch_up` comes before."""
        known = [*self._states, *(each for each in states if each is not None)]
        self._states, self._counts = [], []
        if known:
            joined = mx.concatenate(known)
            self.add(joined, [1] * len(joined))

    def rows(self, rows: list[int]) -> HeadDrafts:
        """The states of these rows."""
        part = HeadDrafts(self._loaded)
        indices = mx.array(rows)
        for states, counts in zip(self._states, self._counts, strict=True) if rows else ():
            part.add(states[indices], [counts[row] for row in rows])
        return part

    def catch_up(self, cache: list[Any], seqs: Sequence[DecodingSequence]) -> None:
        """Append all tokens to the head's layers that the model's layers have."""
        if not self._states or self._have_newest_alone:
            return
        layers = self._loaded.head_layers(cache)
        counts = [count - 1 for count in self._num_pending()]
        newest = self._gather([[count] for count in counts])
        if any(counts):
            rows = [seq.token_ids[-n:] if n else [] for seq, n in _of(seqs, counts)]
            self._append(rows, layers, seqs)
        self._states, self._counts = [newest], [[1] * len(seqs)]
        mx.async_eval(newest, buffers_of(layers))  # type: ignore[no-untyped-call]

    def bound(self, cache: list[Any], seqs: Sequence[DecodingSequence]) -> None:
        """Catch up if there are many pending states."""
        if sum(state.shape[1] for state in self._states) * len(seqs) > _MAX_PENDING:
            self.catch_up(cache, seqs)

    def after(
        self, cache: list[Any], seqs: Sequence[DecodingSequence], newest: Sequence[int]
    ) -> DraftByHead | None:
        """The function that drafts after the `newest` token of each row; None without a head."""
        head = self._loaded.draft_head
        if head is None:
            return None
        if isinstance(head, BlockHead):
            return partial(self._draft_block, head, cache, seqs, newest)
        assert isinstance(head, StepwiseHead)
        return partial(self._draft_in_steps, head, self._loaded.head_layers(cache), seqs, newest)

    def _draft_block(
        self,
        head: BlockHead,
        cache: list[Any],
        seqs: Sequence[DecodingSequence],
        newest: Sequence[int],
        count: int,
    ) -> list[list[int]]:
        self.catch_up(cache, seqs)
        [states], layers = self._states, self._loaded.head_layers(cache)
        guesses = head.draft_block(newest, states, layers, count)
        drafts: list[list[int]] = to_numpy(guesses).tolist()
        return drafts

    def _draft_in_steps(
        self,
        head: StepwiseHead,
        layers: list[Any],
        seqs: Sequence[DecodingSequence],
        newest: Sequence[int],
        count: int,
    ) -> list[list[int]]:
        counts = [number - 1 for number in self._num_pending()]
        rows = [
            [*(seq.token_ids[-n:] if n else []), token]
            for (seq, n), token in zip(_of(seqs, counts), newest, strict=True)
        ]
        states = self._append(rows, layers, seqs)
        last = mx.array([len(row) - 1 for row in rows])
        state = states[mx.arange(len(rows)), last][:, None]
        self._states, self._counts = [], []
        guesses = [head.guess(state)]
        positions = [seq.position + seq.prompt.rope_delta for seq in seqs]
        for number in range(1, count):
            after = [position + number for position in positions]
            state = head.append_text(guesses[-1], state, layers, after)
            guesses.append(head.guess(state))
        if head.num_layers:
            _cut(layers, [count - 1] * len(rows))
        drafts: list[list[int]] = to_numpy(mx.concatenate(guesses, axis=1)).tolist()
        return drafts

    @property
    def _have_newest_alone(self) -> bool:
        return len(self._states) == 1 and self._states[0].shape[1] == 1

    def _num_pending(self) -> list[int]:
        return [sum(counts) for counts in zip(*self._counts, strict=True)]

    def _append(
        self, rows: list[list[int]], layers: Sequence[Any], seqs: Sequence[DecodingSequence]
    ) -> mx.array:
        """Append each row's first pending tokens; returns the head's states, with padding."""
        width = max(map(len, rows))
        token_ids = np.zeros((len(rows), width), dtype=np.int32)
        for row, tokens in enumerate(rows):
            token_ids[row, : len(tokens)] = tokens
        hidden = self._gather([list(range(len(row))) for row in rows])
        positions = [
            seq.position + seq.prompt.rope_delta - (number - 1)
            for seq, number in _of(seqs, self._num_pending())
        ]
        head = self._loaded.draft_head
        assert head is not None
        states = head.append_text(mx.array(token_ids), hidden, layers, positions)
        _cut(layers, [width - len(row) for row in rows])
        return states

    def _gather(self, wanted: list[list[int]]) -> mx.array:
        """The pending states of each row with these numbers, (rows, tokens, hidden), padded."""
        if self._have_newest_alone:
            return self._states[0]
        starts = [0, *accumulate(state.shape[1] for state in self._states)]
        places = np.zeros((len(wanted), max(map(len, wanted))), dtype=np.int32)
        for row, numbers in enumerate(wanted):
            kept = [
                start + place
                for start, counts in zip(starts, self._counts, strict=False)
                for place in range(counts[row])
            ]
            places[row, : len(numbers)] = [kept[number] for number in numbers]
        states = mx.concatenate(self._states, axis=1)
        return states[mx.arange(len(wanted))[:, None], mx.array(places)]


def _of(
    seqs: Sequence[DecodingSequence], numbers: Sequence[int]
) -> list[tuple[DecodingSequence, int]]:
    return list(zip(seqs, numbers, strict=True))


def _cut(layers: Sequence[Any], counts: list[int]) -> None:
    """Remove the last `counts` tokens of each row."""
    if not any(counts):
        return
    for layer in layers:
        if isinstance(layer, RowsKVCache):
            layer.cut(counts)
        else:
            layer.trim(counts[0])
