"""All sequences that decode: together, but for requests whose grammars are late.

A request whose grammar takes longer than a moment leaves the batch and decodes apart, whenever its
grammar is ready: it skips steps, and the others go on. Once its grammar has been in time for a
while, it comes back; the more often it left, the longer that takes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from vlm_server.cache.prompt_key import PromptKey
from vlm_server.errors import RequestError
from vlm_server.interfaces import SeqId
from vlm_server.runner.kv.segments import SequenceState
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.prompt_chunk import PromptChunk
from vlm_server.runner.text.decode_batch import DecodeBatch
from vlm_server.runner.text.drawn import Sampled
from vlm_server.runner.text.prefill import Prefilled
from vlm_server.runner.text.speculation.speculation import Speculation

_MAX_PATIENCE_SECONDS = 0.05
"""How long all wait for grammars that usually are in time; most take a tenth of a millisecond."""
_PATIENCE_PER_MASK_SECONDS = 0.001
"""How long all wait for each in the long run."""
_ALONE_SECONDS = 0.02
"""How long to wait for a grammar where there is nothing else to decode."""
_ALL_TOGETHER_SECONDS = 3600.0
"""How long all wait where nobody may decode apart: grammars have limits of their own."""
_STEPS_IN_TIME = 32
"""After so many a request comes back; twice as many each time."""


@dataclass(slots=True)
class _Apart:
    """A request that decodes apart. in_time: its steps for which nobody would have had to wait."""

    batch: DecodeBatch
    in_time: int = 0


class DecodeBatches:
    """The sequences of a model. Each `launch` is followed by one `result`."""

    def __init__(self, loaded: LoadedModel, speculation: Speculation | None = None) -> None:
        """`speculation`: for those that decode together."""
        self._speculation = speculation
        self._together = DecodeBatch(loaded, speculation)
        self._may_part = loaded.ranks is None
        """Several ranks do the same steps: all wait for a grammar then."""
        self._apart: dict[str, _Apart] = {}
        """By request; the one that waits longest for its turn first."""
        self._times_late: dict[str, int] = {}
        """How often each of these requests left the others."""
        self._patience_seconds = _MAX_PATIENCE_SECONDS

    @property
    def seq_ids(self) -> tuple[SeqId, ...]:
        return tuple(seq_id for batch in self._batches() for seq_id in batch.seq_ids)

    def join(self, prefills: Mapping[str, Prefilled], logits: mx.array) -> Sampled:
        """See `DecodeBatch.join`."""
        return self._together.join(prefills, logits)

    def runs_on(self, cache: list[Any]) -> bool:
        """See `DecodeBatch.runs_on`."""
        return any(batch.runs_on(cache) for batch in self._batches())

    def fault(self, seq_id: SeqId) -> RequestError | None:
        """Why a sequence's grammar does not let it go on, if it does not."""
        return next((fault for batch in self._batches() if (fault := batch.fault(seq_id))), None)

    def state_of(self, seq_id: SeqId) -> tuple[PromptKey, SequenceState, str] | None:
        """See `DecodeBatch.state_of`."""
        found = (batch.state_of(seq_id) for batch in self._batches())
        return next((state for state in found if state is not None), None)

    def leave(self, seq_ids: Collection[SeqId]) -> None:
        """Drop sequences, and what they were about to draw. Those not here are no error."""
        for batch in self._batches():
            batch.leave(seq_ids)
        self._apart = {name: each for name, each in self._apart.items() if each.batch.seq_ids}
        if self._times_late:
            staying = {seq.request_id for seq in self.seq_ids}
            self._times_late = {n: times for n, times in self._times_late.items() if n in staying}

    def launch(self, *, is_alone: bool = True, beside: PromptChunk | None = None) -> None:
        """Begin the next step of all sequences, but for those that have to wait.

        is_alone: whether the device has nothing else to do meanwhile. beside: see `TextModel.step`.
        """
        if self._speculation is not None and (self._apart or not is_alone):
            self._speculation.forget_time()
        self._take_back()
        together, apart = self._together, list(self._apart)
        together.forward(beside)
        if together.num_guided:
            self._wait_for_grammars()
        together.draw()
        if apart:  # not those that left just now: they have begun this step
            self._step_one(apart)

    def settle(self) -> None:
        """Wait for all that was launched. Raises what made it fail."""
        mx.eval([array for batch in self._batches() for array in batch.launched])

    def result(self) -> Sampled:
        """What the steps that were launched bring; see `DecodeBatch.result`."""
        sampled = Sampled()
        for batch in self._batches():
            sampled.add(batch.result())
        return sampled

    def _batches(self) -> Iterator[DecodeBatch]:
        yield self._together
        for each in self._apart.values():
            yield each.batch

    def _wait_for_grammars(self) -> None:
        """As long as patience lasts; who is late then decodes apart."""
        started = time.monotonic()
        more = _PATIENCE_PER_MASK_SECONDS * self._together.num_guided
        patience = min(self._patience_seconds + more, _MAX_PATIENCE_SECONDS)
        if not self._may_part:
            patience = _ALL_TOGETHER_SECONDS
        for request_id in self._together.late(patience):
            self._part(request_id)
        self._patience_seconds = max(patience - (time.monotonic() - started), 0.0)

    def _part(self, request_id: str) -> None:
        batch = self._together.split(request_id)
        batch.yield_to_others()
        self._apart[request_id] = _Apart(batch)
        self._times_late[request_id] = self._times_late.get(request_id, 0) + 1

    def _step_one(self, apart: list[str]) -> None:
        """A step of the first that can; if nobody else decodes, after a short wait."""
        ready = next((name for name in apart if self._is_in_time(name)), None)
        if ready is None and not self._together.seq_ids:
            first = apart[0]
            if self._apart[first].batch.late(_ALONE_SECONDS):
                self._apart[first] = self._apart.pop(first)  # the next one's turn to be waited for
            else:
                ready = first
        if ready is None:
            return
        each = self._apart[ready] = self._apart.pop(ready)
        each.in_time += 1
        each.batch.draw()
        each.batch.forward()

    def _is_in_time(self, request_id: str) -> bool:
        each = self._apart[request_id]
        if each.batch.late(0.0):
            each.in_time = 0
            return False
        return True

    def _take_back(self) -> None:
        for request_id, each in list(self._apart.items()):
            wanted = _STEPS_IN_TIME << min(self._times_late[request_id] - 1, 16)
            if each.in_time >= wanted and not each.batch.late(0.0):
                each.batch.draw()
                self._together.absorb(each.batch)
                del self._apart[request_id]
