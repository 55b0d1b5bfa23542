"""The `Runner` of the engine: does what a plan says with one loaded model.

A chunk that fails ends only its own request, and so does a sequence whose logits are not finite;
prompts that fail together are prefilled again one by one. A decode step that fails ends the
sequences that shared it, and the prompts whose chunks it read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx

from vlm_server.cache.prefix import Source
from vlm_server.cache.prompt_key import PromptKey
from vlm_server.errors import EngineBroken, InternalError, RequestError
from vlm_server.interfaces import (
    PrefillWork,
    PreparedPrompt,
    SchedulerOutput,
    SeqId,
    StepResult,
)
from vlm_server.runner.device.faults import Faults
from vlm_server.runner.kv.segments import StateSize
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.prompt_chunk import PromptChunk
from vlm_server.runner.sampling.sampler import NO_TOKEN
from vlm_server.runner.text.decode_batches import DecodeBatches
from vlm_server.runner.text.drawn import Sampled
from vlm_server.runner.text.prefill import Prefill, Prefilled
from vlm_server.runner.text.prefill_together import launch_together
from vlm_server.runner.text.speculation.build import speculation_of

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Failures:
    """What went wrong in one step."""

    faults: Faults
    requests: dict[str, RequestError] = field(default_factory=dict)
    error: str | None = None

    def add(self, error: Exception, request_ids: tuple[str, ...], message: str) -> None:
        """`error` was raised, and ends these requests with `message`."""
        self.error = f"{type(error).__name__}: {error}"
        failure = self.faults.request_error(error, message)
        self.requests.update(dict.fromkeys(request_ids, failure))


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """The `Step` of a `ModelRunner`. logits: (prompts, vocabulary), lazy, of their last tokens.

    together: the prompts, if there are several, by request.
    """

    runner: ModelRunner
    plan: SchedulerOutput
    together: Mapping[str, Prefilled]
    logits: mx.array | None
    prefill_started: float
    """When launching the chunk began, by `time.perf_counter`."""
    failures: _Failures
    is_beside: bool = False
    """Whether the chunk is read by the decode step."""

    def result(self) -> StepResult:
        """Never raises for a request's fault: see `StepResult.failures`."""
        return self.runner.finish(self)


class PrefixStore(Protocol):
    """Where the state of prompts and answers goes, for others to begin with."""

    @property
    def stores_prefixes(self) -> bool:
        """Whether anything is kept."""
        ...

    def store_prefix(self, prompt: PromptKey, source: Source[Any, Any], salt: str) -> None:
        """What was just computed of `prompt`."""
        ...


class ModelRunner:
    """Holds the KV cache of every request: prompts being prefilled, and sequences that decode."""

    def __init__(
        self, loaded: LoadedModel, prefixes: PrefixStore, num_draft_tokens: int = 0
    ) -> None:
        """`num_draft_tokens`: the most that a step verifies of a sequence; 0 for none."""
        self._loaded = loaded
        self._prefixes = prefixes
        self._prefills: dict[str, Prefill] = {}
        self._joined: list[Prefilled] = []
        """Prompts that are not stored in the prefix cache yet."""
        self._state_size: StateSize | None = None
        self._batches = DecodeBatches(loaded, speculation_of(loaded, num_draft_tokens))
        self._faults = loaded.faults
        self._num_late = 0
        """Of those, how many are not the sequences' own."""
        self._decode_error: Exception | None = None
        """Why nothing that the sequences computed since the last step can be trusted."""

    @property
    def num_tracked(self) -> int:
        """Prompts and sequences that hold device memory."""
        return len(self._prefills) + len(self._batches.seq_ids)

    def kv_bytes(self, num_tokens: int) -> int:
        """See `Runner`."""
        return 0 if self._state_size is None else self._state_size.of(num_tokens)

    def tokens_beside(self, prompt: PreparedPrompt, num_seqs: int) -> int:
        """See `Runner`."""
        if prompt.atomic_prefill_tokens or prompt.token_types is not None:
            return 0
        return self._loaded.text.most_beside(num_seqs, has_media=bool(prompt.spans))

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """Begin one decode step and one chunk. Never raises for a request's fault."""
        self._spare_sequences()
        self._forget(plan.finished_seqs)
        failures = _Failures(self._faults)
        with self._loaded.position_lock:
            chunk = self._chunk_beside(plan, failures)
            self._launch_decode(plan, chunk, failures)
            self._store_prompts()
            if plan.prefill is not None:
                self.settle()
            started = time.perf_counter()
            together = dict[str, Prefilled]()
            if plan.prefill_with:
                together, logits = self._launch_together(plan, failures)
            else:
                logits = self._launch_prefill(plan, chunk, failures)
        is_beside = chunk is not None and chunk.logits is not None
        return LaunchedStep(self, plan, together, logits, started, failures, is_beside)

    def settle(self) -> None:
        """See `Runner`."""
        if self._faults.come_late and self._decode_error is None:
            try:
                self._batches.settle()
            except Exception as error:
                logger.exception("a decode step failed")
                self._decode_error = error

    def plan_ahead(self) -> bool:
        """See `Runner`."""
        attention = self._loaded.attention.attention
        try:
            if self._loaded.text.compile_next():
                return True
            return attention.schedule_next()
        except Exception:
            logger.exception("planning ahead failed")
            return True  # what failed is noted, and the next is tried

    def finish(self, step: LaunchedStep) -> StepResult:
        """What a launched step brings; see `LaunchedStep.result`."""
        failures = step.failures
        reading_since = time.perf_counter()
        sampled = self._read_decode(step.plan, failures)
        read_seconds = time.perf_counter() - reading_since  # the device was not at the chunk yet
        if step.plan.prefill_with:
            sampled.add(self._finish_together(step, failures))
        elif step.plan.prefill is not None and step.logits is not None:
            sampled.add(self._finish_prefill(step, step.plan.prefill, step.logits))
        seconds = time.perf_counter() - step.prefill_started - read_seconds
        return StepResult(
            sampled.tokens,
            failures.requests,
            sampled.logprobs,
            sampled.drafts,
            prefill_seconds=None if step.is_beside else seconds,
            error=failures.error,
        )

    # ---- decode --------------------------------------------------------------------

    def _launch_decode(
        self, plan: SchedulerOutput, beside: PromptChunk | None, failures: _Failures
    ) -> None:
        assert set(plan.decode) == set(self._batches.seq_ids)
        try:
            self._batches.launch(is_alone=plan.prefill is None, beside=beside)
        except Exception as error:
            logger.exception("a decode step of %d sequences failed", len(plan.decode))
            self._fail_decode(plan, error, failures)
            if beside is not None and beside.logits is not None and plan.prefill is not None:
                self._drop(plan.prefill.request_id, error, failures)

    def _read_decode(self, plan: SchedulerOutput, failures: _Failures) -> Sampled:
        try:
            sampled = self._batches.result()
            self._check_decode()
        except Exception as error:
            logger.exception("a decode step of %d sequences failed", len(plan.decode))
            self._fail_decode(plan, error, failures)
            return Sampled()
        return self._sound(sampled, failures)

    def _check_decode(self) -> None:
        """Raises what makes everything worthless that the sequences have computed."""
        error, self._decode_error = self._decode_error, None
        if error is None and self._faults.num_late > self._num_late:
            error = self._faults.last_late
        if error is not None:
            raise error

    def _fail_decode(self, plan: SchedulerOutput, error: Exception, failures: _Failures) -> None:
        request_ids = tuple(seq.request_id for seq in plan.decode)
        failures.add(error, request_ids, "The model failed while decoding.")
        self._batches.leave(plan.decode)
        self._joined.clear()
        for request_id, prefill in list(self._prefills.items()):
            if prefill.is_by_decode_step:
                self._drop(request_id, error, failures)

    def _sound(self, sampled: Sampled, failures: _Failures) -> Sampled:
        """`sampled` without what could not be drawn; those sequences leave, not stored."""
        for seq in [seq for seq, tokens in sampled.tokens.items() if NO_TOKEN in tokens]:
            del sampled.tokens[seq]
            failures.requests[seq.request_id] = self._fault(seq)
            self._batches.leave([seq])
        return sampled

    def _fault(self, seq: SeqId) -> RequestError:
        """Why no token could be drawn."""
        if fault := self._batches.fault(seq):
            return fault
        logger.error("a sequence's scores are not finite: no token can be drawn")
        return InternalError("The model's scores for the next token are NaN.")

    # ---- prefill -------------------------------------------------------------------

    def _chunk_beside(self, plan: SchedulerOutput, failures: _Failures) -> PromptChunk | None:
        """The chunk of `plan`, if the decode step may read it."""
        work = plan.prefill
        if work is None or plan.prefill_with or not plan.decode:
            return None
        prompts = {request.request_id: request.prompt for request in plan.new}
        prompt = prompts.get(work.request_id) or self._prefills[work.request_id].prompt
        if work.num_tokens > self.tokens_beside(prompt, len(plan.decode)):
            return None  # what the device does not need yet is better done while it decodes
        try:
            return self._prefill_of(plan, work).chunk(work.start, work.end)
        except Exception as error:
            logger.exception("prefilling tokens %d to %d failed", work.start, work.end)
            self._drop(work.request_id, error, failures)
            return None

    def _launch_prefill(
        self, plan: SchedulerOutput, chunk: PromptChunk | None, failures: _Failures
    ) -> mx.array | None:
        """The chunk's last logits, lazy; None if there is no chunk, or it failed."""
        work = plan.prefill
        if work is None or work.request_id in failures.requests:
            return None
        try:
            return self._prefill_of(plan, work).launch(work.start, work.end, chunk)
        except Exception as error:
            logger.exception("prefilling tokens %d to %d failed", work.start, work.end)
            self._drop(work.request_id, error, failures)
            return None

    def _prefill_of(self, plan: SchedulerOutput, work: PrefillWork) -> Prefill:
        for request in plan.new:
            if request.request_id == work.request_id and request.request_id not in self._prefills:
                self._prefills[request.request_id] = Prefill(self._loaded, request)
        return self._prefills[work.request_id]

    def _finish_prefill(self, step: LaunchedStep, work: PrefillWork, logits: mx.array) -> Sampled:
        """Wait for a chunk; after the last one the request's sequences join: their first tokens.

        A chunk that the decode step reads is waited for with that.
        """
        failures = step.failures
        if work.request_id in failures.requests:  # with the decode step that read its chunk
            return Sampled()
        prefill = self._prefills[work.request_id]
        try:
            if not work.is_last:
                if not step.is_beside:
                    prefill.wait()
                return Sampled()
            sampled = self._batches.join({work.request_id: prefill}, logits)
            self._state_size = self._state_size or StateSize(
                prefill.cache, prefill.prompt.num_tokens
            )
        except Exception as error:
            logger.exception("prefilling tokens %d to %d failed", work.start, work.end)
            self._drop(work.request_id, error, failures)
            return Sampled()
        del self._prefills[work.request_id]
        sound = self._sound(sampled, failures)
        if work.request_id not in failures.requests:
            self._joined.append(prefill)
        return sound

    def _launch_together(
        self, plan: SchedulerOutput, failures: _Failures
    ) -> tuple[dict[str, Prefilled], mx.array | None]:
        """Several whole prompts, and their last logits, lazy; None if that failed."""
        try:
            return launch_together(self._loaded, plan.new)
        except Exception as error:
            logger.exception("prefilling %d prompts together failed", len(plan.new))
            failures.add(error, (), "")
            self._spare_sequences()
            return {}, None

    def _finish_together(self, step: LaunchedStep, failures: _Failures) -> Sampled:
        """Wait for several prompts; their first tokens. What fails is done one by one."""
        if step.logits is None:
            return self._one_by_one(step.plan, failures)
        try:
            sampled = self._batches.join(step.together, step.logits)
        except Exception as error:
            logger.exception("prefilling %d prompts together failed", len(step.together))
            failures.add(error, (), "")
            self._spare_sequences()
            return self._one_by_one(step.plan, failures)
        sound = self._sound(sampled, failures)
        self._joined += [
            prefilled
            for request_id, prefilled in step.together.items()
            if request_id not in failures.requests
        ]
        return sound

    def _one_by_one(self, plan: SchedulerOutput, failures: _Failures) -> Sampled:
        """All prompts of a plan, from their beginning."""
        sampled = Sampled()
        for request, work in zip(plan.new, plan.prefills, strict=True):
            with self._loaded.position_lock:
                alone = SchedulerOutput(new=(request,), prefill=work)
                logits = self._launch_prefill(alone, None, failures)
            if logits is not None:
                step = LaunchedStep(self, alone, {}, logits, 0.0, failures)
                sampled.add(self._finish_prefill(step, work, logits))
        return sampled

    def _drop(self, request_id: str, error: Exception, failures: _Failures) -> None:
        """A chunk failed: its request ends, and nothing of its prompt is stored."""
        self._prefills.pop(request_id, None)
        failures.add(error, (request_id,), "The model failed while reading the prompt.")
        self._spare_sequences()

    # ---- the prefix cache ----------------------------------------------------------

    def _forget(self, released: tuple[SeqId, ...]) -> None:
        if released:
            self._store_prompts()
        for seq in released:
            self._store_begun(seq)
            self._store_answer(seq)
        self._batches.leave(released)

    def _store_prompts(self) -> None:
        """Let others reuse the prompts that have joined; not while their first token waits."""
        for prefill in self._joined:
            prompt = prefill.prompt
            if prompt.is_atomic or not self._may_store():
                continue
            state = prefill.state(are_free=not self._batches.runs_on(prefill.cache))
            with self._log_store_errors():
                self._prefixes.store_prefix(prompt.key, state, prompt.cache_salt)
        self._joined.clear()

    def _store_begun(self, seq: SeqId) -> None:
        """Let the same prompt go on where its prefill was cancelled."""
        prefill = self._prefills.pop(seq.request_id, None)
        if prefill is None or not (self._prefixes.stores_prefixes and self._may_store()):
            return
        with self._log_store_errors():
            if (found := prefill.end_early()) is not None:
                self._prefixes.store_prefix(*found, prefill.prompt.cache_salt)

    def _store_answer(self, seq: SeqId) -> None:
        """Let the conversation go on from the end of a sequence that leaves."""
        if not (self._prefixes.stores_prefixes and self._may_store()):
            return
        with self._log_store_errors():
            if (found := self._batches.state_of(seq)) is not None:
                self._prefixes.store_prefix(*found)

    @contextmanager
    def _log_store_errors(self) -> Iterator[None]:
        """Storing is optional: what can't be stored, as when memory is short, is computed again."""
        try:
            yield
        except EngineBroken:
            raise
        except Exception as error:
            self._faults.request_error(error, "")
            self._spare_sequences()
            logger.exception("the state of a prompt can't be stored")

    def _spare_sequences(self) -> None:
        """What errors were told until now came of others: `settle` was called before."""
        self._num_late = self._faults.num_late

    def _may_store(self) -> bool:
        """Whether nothing that sequences have computed is known to be worthless."""
        self.settle()
        return self._decode_error is None and self._faults.num_late == self._num_late
