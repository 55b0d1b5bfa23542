"""All sequences that decode: one batch, and the requests that are detached from it.

A request whose grammar takes longer than a moment is detached from the batch and decodes whenever
its grammar is ready: it skips steps, and the others go on. Once its grammar has been in time for a
while, it comes back; the more often it was detached, the longer that takes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from vlm_server.errors import RequestError
from vlm_server.interfaces import SeqId
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.chunks import PromptChunk
from vlm_server.runner.text.decode_batch import DecodeBatch
from vlm_server.runner.text.prefill import Prefilled, Storable
from vlm_server.runner.text.sequence import Sampled
from vlm_server.runner.text.speculation import Speculation

_MAX_PATIENCE_SECONDS = 0.05
"""Longest wait for grammars that usually are in time; most take a tenth of a millisecond."""
_PATIENCE_PER_MASK_SECONDS = 0.001
"""Average wait for each grammar in the long run."""
_ALONE_SECONDS = 0.02
"""Wait for a grammar where there is nothing else to decode."""
_ALL_TOGETHER_SECONDS = 3600.0
"""Longest wait where no request may be detached: grammars have limits of their own."""
_STEPS_IN_TIME = 32
"""Number after which a request comes back; it doubles each time."""


@dataclass(slots=True)
class _Detached:
    """A detached request. in_time: its latest steps for which the batch need not have waited."""

    batch: DecodeBatch
    in_time: int = 0


class DecodeGroups:
    """The sequences of a model. Each `launch` is followed by one `result`."""

    def __init__(self, loaded: LoadedModel, speculation: Speculation) -> None:
        """`speculation`: for the batch; detached requests verify no drafts."""
        self._speculation = speculation
        self._batch = DecodeBatch(loaded, speculation)
        self._may_detach = loaded.ranks is None
        """Several ranks do the same steps: all wait for a grammar then."""
        self._detached: dict[str, _Detached] = {}
        """By request; the one that waits longest for its turn first."""
        self._times_late: dict[str, int] = {}
        """Number of times that each request was detached."""
        self._patience_seconds = _MAX_PATIENCE_SECONDS

    @property
    def seq_ids(self) -> tuple[SeqId, ...]:
        return tuple(seq_id for batch in self._batches() for seq_id in batch.seq_ids)

    def join(self, prefills: Mapping[str, Prefilled], logits: mx.array) -> Sampled:
        return self._batch.join(prefills, logits)

    def runs_on(self, cache: list[Any]) -> bool:
        return any(batch.runs_on(cache) for batch in self._batches())

    def fault(self, seq_id: SeqId) -> RequestError | None:
        """Why a sequence's grammar does not let it go on, if it does not."""
        return next((fault for batch in self._batches() if (fault := batch.fault(seq_id))), None)

    def storable(self, seq_id: SeqId) -> Storable | None:
        found = (batch.storable(seq_id) for batch in self._batches())
        return next((each for each in found if each is not None), None)

    def remove(self, seq_ids: Collection[SeqId]) -> None:
        for batch in self._batches():
            batch.remove(seq_ids)
        self._detached = {name: each for name, each in self._detached.items() if each.batch.seq_ids}
        if self._times_late:
            staying = {seq.request_id for seq in self.seq_ids}
            self._times_late = {n: times for n, times in self._times_late.items() if n in staying}

    def launch(self, *, is_alone: bool = True, chunk: PromptChunk | None = None) -> mx.array | None:
        """Begin the next step of all sequences, but for those that have to wait.

        is_alone: whether the device has nothing else to do meanwhile. chunk, and the logits that
        are returned: see `DecodeBatch.forward`.
        """
        if self._detached or not is_alone:
            self._speculation.discard_time()
        self._reattach()
        batch, detached = self._batch, list(self._detached)
        chunk_logits = batch.forward(chunk)
        if batch.num_guided:
            self._wait_for_grammars()
        batch.sample()
        if detached:  # not those that were detached just now: they have begun this step
            self._step_one(detached)
        return chunk_logits

    def synchronize(self) -> None:
        """Wait for all that was launched. Raises what made it fail."""
        mx.eval([array for batch in self._batches() for array in batch.pending_arrays])

    def result(self) -> Sampled:
        """The tokens of the steps that were launched; see `DecodeBatch.result`."""
        sampled = Sampled()
        for batch in self._batches():
            sampled.add(batch.result())
        return sampled

    def _batches(self) -> Iterator[DecodeBatch]:
        yield self._batch
        for each in self._detached.values():
            yield each.batch

    def _wait_for_grammars(self) -> None:
        """Wait as long as patience lasts, and detach the requests that are late then."""
        started = time.monotonic()
        patience = _ALL_TOGETHER_SECONDS
        if self._may_detach:
            more = _PATIENCE_PER_MASK_SECONDS * self._batch.num_guided
            patience = min(self._patience_seconds + more, _MAX_PATIENCE_SECONDS)
        for request_id in self._batch.late_requests(patience):
            batch = self._batch.detach(request_id)
            batch.lower_priority()
            self._detached[request_id] = _Detached(batch)
            self._times_late[request_id] = self._times_late.get(request_id, 0) + 1
        self._patience_seconds = max(patience - (time.monotonic() - started), 0.0)

    def _step_one(self, detached: list[str]) -> None:
        """Step the first request whose grammar is ready; if nobody else decodes, wait a moment."""
        ready = next((name for name in detached if self._is_ready(name)), None)
        if ready is None and not self._batch.seq_ids:
            first = detached[0]
            if self._detached[first].batch.late_requests(_ALONE_SECONDS):
                self._detached[first] = self._detached.pop(first)  # the next one's turn
            else:
                ready = first
        if ready is None:
            return
        each = self._detached[ready] = self._detached.pop(ready)
        each.in_time += 1
        each.batch.sample()
        each.batch.forward()

    def _is_ready(self, request_id: str) -> bool:
        each = self._detached[request_id]
        if is_late := bool(each.batch.late_requests(0.0)):
            each.in_time = 0
        return not is_late

    def _reattach(self) -> None:
        for request_id, each in list(self._detached.items()):
            wanted = _STEPS_IN_TIME << min(self._times_late[request_id] - 1, 16)
            if each.in_time >= wanted and not each.batch.late_requests(0.0):
                each.batch.sample()
                self._batch.reattach(each.batch)
                del self._detached[request_id]
