"""Does what a plan says with one loaded model. Knows requests only by their ids.

The `Runner` of the engine. A chunk that fails ends its own request alone, and so does a row
whose scores are not numbers; a decode step that fails ends the rows that shared it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx

from vlm_server.cache.caches import Caches
from vlm_server.errors import InternalError, InvalidRequest, OutOfMemory, RequestError
from vlm_server.ports import (
    SCHEMA_PARAM,
    NewRequest,
    PrefillWork,
    SchedulerOutput,
    SeqId,
    StepResult,
)
from vlm_server.runner.device.memory import NO_MEMORY, is_out_of_memory
from vlm_server.runner.kv.segments import SequenceState, StateSize
from vlm_server.runner.model.load import LoadedModel
from vlm_server.runner.sampling.sampler import NO_TOKEN
from vlm_server.runner.text.decode_batch import DecodeBatch, Drawn
from vlm_server.runner.text.prefill import Prefill

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Failed:
    """What went wrong in one step."""

    requests: dict[str, RequestError] = field(default_factory=dict)
    error: str | None = None

    def take(self, error: Exception, request_ids: tuple[str, ...], message: str) -> None:
        """`error` was raised, and ends these requests with `message`."""
        self.error = f"{type(error).__name__}: {error}"
        failure = OutOfMemory(NO_MEMORY) if is_out_of_memory(error) else InternalError(message)
        self.requests.update(dict.fromkeys(request_ids, failure))


@contextmanager
def _that_fails_nobody() -> Iterator[None]:
    """What can't be kept, as when memory is short, will be computed again."""
    try:
        yield
    except Exception:
        logger.exception("the state of a prompt can't be kept")


class ModelRunner:
    """Holds the KV cache of every request: prompts being prefilled, and the rows that decode."""

    def __init__(self, loaded: LoadedModel, caches: Caches | None = None) -> None:
        self._loaded = loaded
        self._caches = caches or Caches.of()
        self._prefills: dict[str, Prefill] = {}
        self._joined: list[Prefill] = []
        """Prompts that the prefix cache has not been shown yet."""
        self._state_size: StateSize | None = None
        self._batch = DecodeBatch(
            loaded.language_model, loaded.host.eos_token_ids, loaded.decode_positions
        )

    @property
    def num_tracked(self) -> int:
        """Prompts and rows that hold device memory."""
        return len(self._prefills) + len(self._batch.seq_ids)

    def kv_bytes(self, num_tokens: int) -> int:
        """Device memory of the state of one row of so many tokens; 0 before the first prompt."""
        return 0 if self._state_size is None else self._state_size.of(num_tokens)

    def execute(self, plan: SchedulerOutput, launched: Callable[[], None]) -> StepResult:
        """One step. Never raises for a request's fault: see `StepResult.failures`."""
        self._forget(plan.released)
        failed = _Failed()
        tokens, scores = self._decode(plan, failed)
        self._store_prompts()
        started = time.perf_counter()
        logits = self._launch(plan.prefill, plan.new, failed) if plan.prefill else None
        launched()
        if plan.prefill and plan.prefill.is_last and logits is not None:
            first, first_scores = self._join(plan.prefill, logits, failed)
            tokens, scores = tokens | first, scores | first_scores
        seconds = time.perf_counter() - started
        return StepResult(tokens, failed.requests, scores, seconds, failed.error)

    def _forget(self, rows: tuple[SeqId, ...]) -> None:
        if rows:
            self._store_prompts()
        for row in rows:
            self._prefills.pop(row.request_id, None)
            self._store_answer(row)
        self._batch.leave(rows)

    def _decode(self, plan: SchedulerOutput, failed: _Failed) -> Drawn:
        assert set(plan.decode) == set(self._batch.seq_ids)
        try:
            tokens, scores = self._batch.step()
        except Exception as error:
            logger.exception("a decode step of %d rows failed", len(plan.decode))
            request_ids = tuple(row.request_id for row in plan.decode)
            failed.take(error, request_ids, "the model failed while decoding")
            self._batch.leave(plan.decode)
            self._joined.clear()
            return {}, {}
        return self._sound(tokens, failed), scores

    def _sound(self, tokens: dict[SeqId, int], failed: _Failed) -> dict[SeqId, int]:
        """`tokens` without those that could not be drawn, whose rows leave: no state is kept."""
        for row in [row for row, token in tokens.items() if token == NO_TOKEN]:
            del tokens[row]
            failed.requests[row.request_id] = self._fault(row)
            self._batch.leave([row])
        return tokens

    def _store_prompts(self) -> None:
        """Let others go on from the prompts that have joined; not while their first token waits."""
        for prefill in self._joined:
            prompt = prefill.prompt
            if prompt.is_atomic:
                continue
            are_free = not self._batch.runs_on(prefill.cache)
            state = SequenceState(prefill.cache, prefill.snapshots, are_free=are_free)
            with _that_fails_nobody():
                self._caches.store_prefix(prompt.elements, state, prompt.cache_salt)
        self._joined.clear()

    def _store_answer(self, row: SeqId) -> None:
        """Let the conversation go on from the end of a row that leaves."""
        if not self._caches.prefixes.limit_bytes:
            return
        with _that_fails_nobody():
            if (found := self._batch.state_of(row)) is not None:
                self._caches.store_prefix(*found)

    def _fault(self, row: SeqId) -> RequestError:
        """Why no token could be drawn."""
        if self._batch.is_stuck(row):
            return InvalidRequest("this schema is too complex to follow", SCHEMA_PARAM)
        logger.error("a row's scores are not finite: no token can be drawn")
        return InternalError("the model's scores for the next token are NaN")

    def _launch(
        self, work: PrefillWork, new: tuple[NewRequest, ...], failed: _Failed
    ) -> mx.array | None:
        """The chunk's last logits, lazy; None if it failed."""
        try:
            for request in new:
                self._prefills[request.request_id] = Prefill(self._loaded, request)
            return self._prefills[work.request_id].run(work.start, work.end)
        except Exception as error:
            logger.exception("prefilling %d tokens failed", work.end - work.start)
            self._drop(work, error, failed)
            return None

    def _join(self, work: PrefillWork, logits: mx.array, failed: _Failed) -> Drawn:
        """Let a prompt that is whole decode with the others: its first tokens."""
        prefill = self._prefills[work.request_id]
        try:
            tokens, scores = self._batch.join(work.request_id, prefill, logits)
            self._state_size = self._state_size or StateSize(
                prefill.cache, prefill.prompt.num_tokens
            )
        except Exception as error:
            logger.exception("joining after %d tokens failed", work.end)
            self._drop(work, error, failed)
            return {}, {}
        del self._prefills[work.request_id]
        sound = self._sound(tokens, failed)
        if work.request_id not in failed.requests:
            self._joined.append(prefill)
        return sound, scores

    def _drop(self, work: PrefillWork, error: Exception, failed: _Failed) -> None:
        """A chunk failed: its request ends, alone."""
        self._prefills.pop(work.request_id, None)
        failed.take(error, (work.request_id,), "the model failed while reading the prompt")
