"""All sequences that decode: the main batch, and a batch for each detached request.

A request whose grammar mask is not ready in time is detached: it decodes in a batch of its own,
whenever its mask is ready. After `_STEPS_IN_TIME` steps without a wait it is reattached; the number
doubles with each detachment.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from vlm_server.errors import RequestError
from vlm_server.interfaces import SeqId
from vlm_server.runner.decode.decode_batch import DecodeBatch
from vlm_server.runner.decode.sequence import Sampled
from vlm_server.runner.decode.speculation import Speculation
from vlm_server.runner.kv.prompt_kv import PrefixEntry, PromptKV
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.chunks import PromptChunk, StepOutput

_MAX_PATIENCE_SECONDS = 0.05
"""Longest wait for late grammars; most masks take a tenth of a millisecond."""
_PATIENCE_PER_MASK_SECONDS = 0.001
"""Average wait per mask in the long run."""
_ALONE_SECONDS = 0.02
"""Wait for a detached request's grammar if nothing else decodes."""
_NEVER_DETACH_SECONDS = 3600.0
"""Wait where no request may be detached; grammars have shorter limits of their own."""
_STEPS_IN_TIME = 32
"""Steps in time before a request is reattached; doubled each time it was detached."""


@dataclass(slots=True)
class _Detached:
    """A detached request."""

    batch: DecodeBatch
    in_time: int = 0
    """Consecutive steps whose masks were ready without a wait."""


class DecodeGroups:
    """The sequences of a model. One `result` follows each `launch`."""

    def __init__(self, loaded: LoadedModel, speculation: Speculation) -> None:
        """`speculation` is the batch's; detached requests verify no drafts."""
        self._speculation = speculation
        self._batch = DecodeBatch(loaded, speculation)
        self._may_detach = loaded.ranks is None
        """False with several ranks, whose steps must be the same: all wait for late grammars."""
        self._detached: dict[str, _Detached] = {}
        """Detached requests; the one that waits longest for its turn first."""
        self._num_detachments: dict[str, int] = {}
        """Number of times that each request was detached."""
        self._patience_seconds = _MAX_PATIENCE_SECONDS

    @property
    def seq_ids(self) -> tuple[SeqId, ...]:
        return tuple(seq_id for batch in self._batches() for seq_id in batch.seq_ids)

    def join(self, prompts: Mapping[str, PromptKV], logits: mx.array) -> Sampled:
        return self._batch.join(prompts, logits)

    def runs_on(self, cache: list[Any]) -> bool:
        return any(batch.runs_on(cache) for batch in self._batches())

    def grammar_error(self, seq_id: SeqId) -> RequestError | None:
        """The error with which a sequence's grammar ends it; None if it does not."""
        errors = (batch.grammar_error(seq_id) for batch in self._batches())
        return next((error for error in errors if error is not None), None)

    def entry(self, seq_id: SeqId) -> PrefixEntry | None:
        entries = (batch.entry(seq_id) for batch in self._batches())
        return next((entry for entry in entries if entry is not None), None)

    def remove(self, seq_ids: Collection[SeqId]) -> None:
        for batch in self._batches():
            batch.remove(seq_ids)
        self._detached = {
            request_id: request
            for request_id, request in self._detached.items()
            if request.batch.seq_ids
        }
        if self._num_detachments:
            staying = {seq.request_id for seq in self.seq_ids}
            self._num_detachments = {
                request_id: number
                for request_id, number in self._num_detachments.items()
                if request_id in staying
            }

    def launch(
        self, *, is_alone: bool = True, chunk: PromptChunk | None = None
    ) -> StepOutput | None:
        """Begin the next step of the batch, and of one detached request whose masks are ready.

        is_alone: whether the device does nothing else during the step. chunk, and the returned
        output: see `DecodeBatch.forward`.
        """
        if self._detached or not is_alone:
            self._speculation.discard_time()
        self._reattach()
        batch, detached = self._batch, list(self._detached)
        chunk_output = batch.forward(chunk)
        if batch.num_guided:
            self._wait_for_grammars()
        batch.sample()
        if detached:  # requests detached just now have begun this step
            self._step_one(detached)
        return chunk_output

    def synchronize(self) -> None:
        """Wait for all that was launched; raises its error."""
        mx.eval([array for batch in self._batches() for array in batch.pending_arrays])

    def result(self) -> Sampled:
        """The tokens of the steps that were launched; see `DecodeBatch.result`."""
        sampled = Sampled()
        for batch in self._batches():
            sampled.add(batch.result())
        return sampled

    def _batches(self) -> Iterator[DecodeBatch]:
        yield self._batch
        for request in self._detached.values():
            yield request.batch

    def _wait_for_grammars(self) -> None:
        """Wait while patience lasts, then detach the requests that are late."""
        started_at = time.monotonic()
        patience = _NEVER_DETACH_SECONDS
        if self._may_detach:
            more = _PATIENCE_PER_MASK_SECONDS * self._batch.num_guided
            patience = min(self._patience_seconds + more, _MAX_PATIENCE_SECONDS)
        for request_id in self._batch.late_requests(patience):
            batch = self._batch.detach(request_id)
            batch.lower_priority()
            self._detached[request_id] = _Detached(batch)
            self._num_detachments[request_id] = self._num_detachments.get(request_id, 0) + 1
        self._patience_seconds = max(patience - (time.monotonic() - started_at), 0.0)

    def _step_one(self, detached: list[str]) -> None:
        """Run a step of the first detached request whose masks are ready.

        If nothing else decodes, waits up to `_ALONE_SECONDS` for the masks of the first one.
        """
        ready = next((request_id for request_id in detached if self._is_ready(request_id)), None)
        if ready is None and not self._batch.seq_ids:
            first = detached[0]
            if self._detached[first].batch.late_requests(_ALONE_SECONDS):
                self._detached[first] = self._detached.pop(first)  # the next request's turn
            else:
                ready = first
        if ready is None:
            return
        request = self._detached[ready] = self._detached.pop(ready)
        request.in_time += 1
        request.batch.finish_late_step()
        request.batch.forward()

    def _is_ready(self, request_id: str) -> bool:
        request = self._detached[request_id]
        if is_late := bool(request.batch.late_requests(0.0)):
            request.in_time = 0
        return not is_late

    def _reattach(self) -> None:
        for request_id, request in list(self._detached.items()):
            min_in_time = _STEPS_IN_TIME << min(self._num_detachments[request_id] - 1, 16)
            if request.in_time >= min_in_time and not request.batch.late_requests(0.0):
                request.batch.finish_late_step()
                self._batch.reattach(request.batch)
                del self._detached[request_id]
