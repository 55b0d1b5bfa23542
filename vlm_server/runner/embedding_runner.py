"""The `Runner` of a model that makes vectors: whole inputs in batches, without KV.

A batch that fails is run again one by one, so that no request fails because of another's input.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import InternalError
from vlm_server.interfaces import NewRequest, PreparedPrompt, SchedulerOutput, StepResult
from vlm_server.runner.device.arrays import StepFailures, to_numpy
from vlm_server.runner.families.embedding import Embedding, EmbeddingBatch
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.chunks import TOKEN_AXES, pad_inputs
from vlm_server.runner.prefill.prefill import PromptInputs

logger = logging.getLogger(__name__)

Pooled = dict[str, NDArray[np.float32]]
"""Vectors, (vectors, dimensions), by request."""


@dataclass(frozen=True, slots=True)
class LaunchedBatch:
    """The `Step` of an `EmbeddingRunner`."""

    runner: EmbeddingRunner
    plan: SchedulerOutput
    failures: StepFailures
    started_at: float
    vectors: mx.array | None
    """Those of all rows, lazy; None if launching them failed."""

    def result(self) -> StepResult:
        """Never raises for the error of a request: see `StepResult.failures`."""
        return self.runner.finish(self)


class EmbeddingRunner:
    """Makes vectors of the inputs of a plan's requests. Holds nothing between two steps."""

    num_tracked = 0

    def __init__(self, loaded: LoadedModel) -> None:
        assert loaded.family.embeds is not None
        self._loaded = loaded
        self._embeds: Embedding = loaded.family.embeds

    def kv_bytes(self, num_tokens: int) -> int:
        return 0

    def max_piggybacked_tokens(self, prompt: PreparedPrompt, num_seqs: int) -> int:
        return 0

    def precompile_next(self) -> bool:
        return False

    def synchronize(self) -> None:
        """Do nothing: each step has waited for its vectors."""

    def launch(self, plan: SchedulerOutput) -> LaunchedBatch:
        """Begin with the inputs of all new requests. Never raises for the error of a request."""
        failures, vectors = StepFailures(self._loaded.errors), None
        started_at = time.perf_counter()
        if plan.new:
            with self._record_error(plan.new, failures):
                vectors = self._launch(plan.new)
        return LaunchedBatch(self, plan, failures, started_at, vectors)

    def finish(self, step: LaunchedBatch) -> StepResult:
        """The vectors and failures of a launched step."""
        pooled, requests, failures = Pooled(), step.plan.new, step.failures
        if step.vectors is not None:
            with self._record_error(requests, failures):
                pooled = self._rows(step.vectors, requests)
        if len(requests) > 1 and not pooled:
            pooled = self._one_by_one(requests, failures)
        seconds = time.perf_counter() - step.started_at
        self._fail_infinite(pooled, failures)
        return StepResult(
            pooled=pooled,
            failures=failures.by_request,
            prefill_seconds=seconds,
            error=failures.last_error,
        )

    def _one_by_one(self, requests: Sequence[NewRequest], failures: StepFailures) -> Pooled:
        pooled = Pooled()
        for request in requests:
            with self._record_error([request], failures):
                pooled |= self._rows(self._launch([request]), [request])
        return pooled

    @contextmanager
    def _record_error(
        self, requests: Sequence[NewRequest], failures: StepFailures
    ) -> Iterator[None]:
        """Record an error in the block, which ends the only request of it, or none of several."""
        num_late = self._loaded.errors.num_late
        try:
            yield
            if self._loaded.errors.num_late != num_late:
                raise self._loaded.errors.last_late
        except Exception as error:
            logger.exception("making vectors of %d inputs failed", len(requests))
            ended = [request.request_id for request in requests] if len(requests) == 1 else []
            failures.record(error, ended, "The model failed while making vectors.")

    def _fail_infinite(self, pooled: Pooled, failures: StepFailures) -> None:
        """End the requests whose vectors are not finite, which would be cached."""
        for request_id in [name for name, rows in pooled.items() if not np.isfinite(rows).all()]:
            del pooled[request_id]
            logger.error("the vectors of an input are not finite")
            error = InternalError("The model's vectors are not finite.")
            failures.by_request[request_id] = error

    # ---- one batch -----------------------------------------------------------------

    def _launch(self, requests: Sequence[NewRequest]) -> mx.array:
        with self._loaded.position_lock, self._loaded.attention.in_place():
            batch = self._batch(requests)
            vectors = self._embeds.embed(self._loaded.model, batch).astype(mx.float32)
            if self._loaded.family.reads_images:
                self._loaded.forget_positions()
            mx.async_eval(vectors)  # type: ignore[no-untyped-call]
        return vectors

    def _batch(self, requests: Sequence[NewRequest]) -> EmbeddingBatch:
        """All inputs as rows, padded on the right to the longest."""
        lengths = tuple(request.prompt.num_tokens for request in requests)
        longest = max(lengths)
        ids = [
            np.pad(request.prompt.token_ids, (0, longest - length), "edge")
            for request, length in zip(requests, lengths, strict=True)
        ]
        arguments: Mapping[str, mx.array] = {}
        types = [r.prompt.token_types for r in requests if r.prompt.token_types is not None]
        if types:  # of pairs of texts
            padded = [np.pad(each, (0, longest - len(each))) for each in types]
            arguments = {"token_type_ids": mx.array(np.stack(padded))}
        if self._loaded.family.reads_images:
            inputs = [PromptInputs(self._loaded, request) for request in requests]
            rows = [
                pad_inputs(each.arguments(0, length), 0, longest - length)
                for each, length in zip(inputs, lengths, strict=True)
            ]
            arguments = _stack(rows)
        return EmbeddingBatch(mx.array(np.stack(ids)), lengths, arguments)

    def _rows(self, vectors: mx.array, requests: Sequence[NewRequest]) -> Pooled:
        """The vectors of each request, evaluated."""
        numbers = to_numpy(vectors)
        if not self._embeds.is_multi:
            numbers = numbers[:, None]
        return {
            request.request_id: np.ascontiguousarray(
                row[: request.prompt.num_tokens] if self._embeds.is_multi else row
            )
            for request, row in zip(requests, numbers, strict=True)
        }


def _stack(rows: Sequence[Mapping[str, mx.array]]) -> dict[str, mx.array]:
    """The arguments of one row each as those of all; an argument that a row lacks is zeros."""
    stacked = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        arrays = [row.get(name) for row in rows]
        like = next(array for array in arrays if array is not None)
        filled = [mx.zeros_like(like) if array is None else array for array in arrays]
        stacked[name] = mx.concatenate(filled, axis=TOKEN_AXES[name] - 1)
    return stacked
