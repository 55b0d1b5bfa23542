"""The `Runner` of the engine: executes plans with one loaded model.

A chunk that fails ends only its own request, and so does a sequence whose logits are not finite.
Prompts whose batched prefill fails are prefilled again one by one. A decode step that fails ends
its sequences, and the prompt whose chunk was piggybacked on it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import InternalError
from vlm_server.interfaces import PrefillWork, PreparedPrompt, SchedulerOutput, StepResult
from vlm_server.protocol import Decision
from vlm_server.runner.decode.decode_groups import DecodeGroups
from vlm_server.runner.decode.sequence import Sampled
from vlm_server.runner.decode.speculation import Speculation
from vlm_server.runner.device.arrays import StepFailures, to_numpy
from vlm_server.runner.kv.prompt_kv import PromptKV
from vlm_server.runner.kv.segments import StateSize
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.model.chunks import StepOutput
from vlm_server.runner.prefill.batched_prefill import launch_batched
from vlm_server.runner.prefill.prefill import Prefill
from vlm_server.runner.prefix_writer import LateErrors, PrefixStore, PrefixWriter
from vlm_server.runner.sampling import NO_TOKEN

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """The `Step` of a `ModelRunner`."""

    runner: ModelRunner
    plan: SchedulerOutput
    failures: StepFailures
    prefill_started: float
    """The start of launching the prefill, by `time.perf_counter`."""
    is_mixed: bool
    """Whether the chunk is part of the decode step."""
    logits: mx.array | None
    """Logits of the last token of the chunk, or of each prompt of a batched prefill, (prompts,
    vocabulary), lazy; None without a prefill, or if launching it failed."""
    batch: Mapping[str, PromptKV]
    """The prompts of a batched prefill, by request."""

    def result(self) -> StepResult:
        """Never raises for the error of a request: see `StepResult.failures`."""
        return self.runner.finish(self)


class ModelRunner:
    """Holds the KV cache of every request: prompts being prefilled, and sequences that decode."""

    def __init__(
        self,
        loaded: LoadedModel,
        prefixes: PrefixStore,
        speculation: Speculation | None = None,
    ) -> None:
        """Without `speculation` no drafts are verified."""
        self._loaded = loaded
        self._prefills: dict[str, Prefill] = {}
        self._joined_prompts: dict[str, PromptKV] = {}
        """Prompts whose sequences have joined since the last launch; the next plan stores them."""
        self._scores: dict[str, NDArray[np.float32]] = {}
        """Scores of documents whose prefill ended in this step, (1, 1), by request."""
        self._decisions: dict[str, Decision] = {}
        """Results of questions whose last options were scored in this step, by request."""
        self._state_size: StateSize | None = None
        self._groups = DecodeGroups(loaded, speculation or Speculation())
        self._errors = LateErrors(loaded.errors, self._groups)
        self._prefixes = PrefixWriter(prefixes, self._groups, loaded.errors, self._errors)

    @property
    def num_tracked(self) -> int:
        return len(self._prefills) + len(self._groups.seq_ids)

    def kv_bytes(self, num_tokens: int) -> int:
        return 0 if self._state_size is None else self._state_size.bytes_for(num_tokens)

    def max_piggybacked_tokens(self, prompt: PreparedPrompt, num_seqs: int) -> int:
        if prompt.atomic_prefill_tokens or prompt.token_types is not None:
            return 0
        return self._loaded.text.max_piggybacked_tokens(num_seqs)

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """Begin one decode step and one prefill. Never raises for the error of a request."""
        self._errors.attribute_to_others()
        failures = StepFailures(self._loaded.errors)
        logits, batch = None, dict[str, PromptKV]()
        with self._loaded.position_lock:
            if plan.finished_seqs:  # which are stored before they go
                self._remove_finished(plan)
            mixed = self._launch_decode(plan, failures)
            if not plan.finished_seqs:
                self._store(plan)  # while the device decodes
            self._joined_prompts = {}
            if plan.prefills:
                self.synchronize()
            started = time.perf_counter()
            if plan.is_batched_prefill:
                with self._record_batch_error(failures):
                    batch, logits = launch_batched(self._loaded, plan.new)
            elif plan.prefills:
                logits = self._launch_chunk(plan, plan.prefills[0], mixed, failures)
        is_mixed = mixed is not None
        return LaunchedStep(self, plan, failures, started, is_mixed, logits, batch)

    def synchronize(self) -> None:
        self._errors.synchronize()

    def precompile_next(self) -> bool:
        attention = self._loaded.attention.attention
        try:
            return self._loaded.text.precompile_next() or attention.precompile_next()
        except Exception:
            logger.exception("precompiling failed")
            return True  # the failed shape is not tried again

    def finish(self, step: LaunchedStep) -> StepResult:
        """The tokens and failures of a launched step."""
        waiting_since = time.perf_counter()
        sampled = self._finish_decode(step.plan, step.failures)
        decode_seconds = time.perf_counter() - waiting_since  # the chunk began only after these
        if step.plan.is_batched_prefill:
            sampled.add(self._finish_batch(step))
        elif step.plan.prefills:
            sampled.add(self._finish_chunk(step.plan.prefills[0], step.logits, step.failures))
        pooled, self._scores = self._scores, {}
        decisions, self._decisions = self._decisions, {}
        seconds = time.perf_counter() - step.prefill_started - decode_seconds
        return StepResult(
            sampled.tokens,
            step.failures.by_request,
            sampled.logprobs,
            sampled.drafts,
            pooled=pooled,
            decisions=decisions,
            prefill_seconds=None if step.is_mixed else seconds,
            error=step.failures.last_error,
        )

    def _remove_finished(self, plan: SchedulerOutput) -> None:
        """Store and remove finished sequences and cancelled prompts."""
        self._store(plan)
        for seq in plan.finished_seqs:
            self._prefills.pop(seq.request_id, None)
        self._groups.remove(plan.finished_seqs)

    def _store(self, plan: SchedulerOutput) -> None:
        """Store prompts and answers in the prefix cache as `plan` says, unless they failed."""
        for request_id in plan.stored_prompts:
            if prompt_kv := self._joined_prompts.get(request_id):
                self._prefixes.store_prompt(prompt_kv)
            elif prefill := self._prefills.get(request_id):
                self._prefixes.store_cancelled(prefill)
        for seq in plan.stored_answers:
            self._prefixes.store_answer(seq)

    # ---- decode --------------------------------------------------------------------

    def _launch_decode(self, plan: SchedulerOutput, failures: StepFailures) -> StepOutput | None:
        """Begin a decode step; returns the chunk's output if it is a mixed one."""
        assert set(plan.decode) == set(self._groups.seq_ids)
        piggybacked, prompt_chunk = self._piggybacked(plan), None
        if piggybacked is not None:
            with self._fail_on_chunk_error(piggybacked, failures):
                prefill = self._prefill_of(plan, piggybacked)
                prompt_chunk = prefill.chunk(piggybacked.start, piggybacked.end)
        try:
            return self._groups.launch(is_alone=not plan.prefills, chunk=prompt_chunk)
        except Exception as error:
            logger.exception("a decode step of %d sequences failed", len(plan.decode))
            self._fail_decode(plan, error, failures)
            if prompt_chunk is not None and piggybacked is not None:  # the chunk may be half done
                self._end_prefill(piggybacked.request_id, error, failures)
            return None

    def _piggybacked(self, plan: SchedulerOutput) -> PrefillWork | None:
        """The plan's chunk, if the decode step may be a mixed one."""
        if plan.is_batched_prefill or not (plan.prefills and plan.decode):
            return None
        (chunk,) = plan.prefills
        if chunk.branches:
            return None
        prompts = {request.request_id: request.prompt for request in plan.new}
        prompt = prompts.get(chunk.request_id) or self._prefills[chunk.request_id].kv.prompt
        if chunk.num_tokens > self.max_piggybacked_tokens(prompt, len(plan.decode)):
            return None  # better to launch the chunk while the device decodes
        return chunk

    def _finish_decode(self, plan: SchedulerOutput, failures: StepFailures) -> Sampled:
        try:
            sampled = self._groups.result()
            self._errors.check()
        except Exception as error:
            logger.exception("a decode step of %d sequences failed", len(plan.decode))
            self._fail_decode(plan, error, failures)
            return Sampled()
        return self._fail_unsampled(sampled, failures)

    def _fail_decode(self, plan: SchedulerOutput, error: Exception, failures: StepFailures) -> None:
        """End all sequences, and the prompts whose latest chunk was part of a mixed step."""
        request_ids = [seq.request_id for seq in plan.decode]
        failures.record(error, request_ids, "The model failed while decoding.")
        self._groups.remove(plan.decode)
        self._joined_prompts = {}
        for request_id, prefill in list(self._prefills.items()):
            if prefill.is_piggybacked:
                self._end_prefill(request_id, error, failures)

    def _fail_unsampled(self, sampled: Sampled, failures: StepFailures) -> Sampled:
        """End the sequences that got no token, without storing them; returns the others."""
        for seq in [seq for seq, tokens in sampled.tokens.items() if NO_TOKEN in tokens]:
            del sampled.tokens[seq]
            error = self._groups.grammar_error(seq)
            if error is None:
                logger.error("a sequence's scores are not finite: no token can be sampled")
                error = InternalError("The model's scores for the next token are NaN.")
            failures.by_request[seq.request_id] = error
            self._groups.remove([seq])
        return sampled

    # ---- prefill -------------------------------------------------------------------

    def _launch_chunk(
        self,
        plan: SchedulerOutput,
        chunk: PrefillWork,
        mixed: StepOutput | None,
        failures: StepFailures,
    ) -> mx.array | None:
        """Begin a chunk; returns its last token's logits, (1, vocabulary), or None if it failed.

        `mixed` is the output of a mixed step that did so.
        """
        logits = None
        if chunk.request_id not in failures.by_request:
            with self._fail_on_chunk_error(chunk, failures):
                prefill = self._prefill_of(plan, chunk)
                if chunk.num_tokens:
                    logits = prefill.launch(chunk.start, chunk.end, mixed)
                if chunk.branches:
                    logits = prefill.launch_options(chunk.branches)
        return logits

    def _prefill_of(self, plan: SchedulerOutput, chunk: PrefillWork) -> Prefill:
        for request in plan.new:
            if request.request_id == chunk.request_id and request.request_id not in self._prefills:
                self._prefills[request.request_id] = Prefill(self._loaded, request)
        return self._prefills[chunk.request_id]

    def _finish_chunk(
        self, chunk: PrefillWork, logits: mx.array | None, failures: StepFailures
    ) -> Sampled:
        """Wait for a chunk; after the last one, let the request's sequences join.

        Returns their first tokens. The result of a mixed step has waited for its chunk.
        """
        sampled = None
        if logits is None or chunk.request_id in failures.by_request:
            return Sampled()
        prefill = self._prefills[chunk.request_id]
        kv = prefill.kv
        with self._fail_on_chunk_error(chunk, failures):
            if chunk.branches:
                prefill.options.result()
            if chunk.is_last and kv.prompt.options:
                self._decisions[chunk.request_id] = prefill.options.decision()
                sampled = Sampled()
            elif chunk.is_last and kv.prompt.is_pooled:
                self._scores[chunk.request_id] = self._score(logits)
                sampled = Sampled()
            elif chunk.is_last:
                sampled = self._groups.join({chunk.request_id: kv}, logits)
                self._state_size = self._state_size or StateSize(kv.cache, kv.prompt.num_tokens)
            elif not (prefill.is_piggybacked or chunk.branches):
                prefill.wait()
        if sampled is None:
            return Sampled()
        del self._prefills[chunk.request_id]
        self._joined_prompts[chunk.request_id] = kv
        return self._fail_unsampled(sampled, failures)

    def _score(self, logits: mx.array) -> NDArray[np.float32]:
        """The probability of yes against no for the next token, (1, 1). Raises InternalError."""
        spec = self._loaded.spec.scores
        assert spec is not None
        assert spec.answers is not None
        yes, no = spec.answers
        score = to_numpy(mx.sigmoid((logits[:, yes] - logits[:, no]).astype(mx.float32)))
        if not np.isfinite(score).all():
            raise InternalError("The model's scores for the next token are NaN.")
        return score.reshape(1, 1)

    @contextmanager
    def _fail_on_chunk_error(self, chunk: PrefillWork, failures: StepFailures) -> Iterator[None]:
        """End the request of `chunk` with an error in the block."""
        try:
            yield
        except Exception as error:
            logger.exception("prefilling tokens %d to %d failed", chunk.start, chunk.end)
            self._end_prefill(chunk.request_id, error, failures)

    def _end_prefill(self, request_id: str, error: Exception, failures: StepFailures) -> None:
        """End a request whose chunk failed; nothing of its prompt is stored."""
        self._prefills.pop(request_id, None)
        failures.record(error, [request_id], "The model failed while prefilling the prompt.")
        self._errors.attribute_to_others()

    # ---- batched prefill -----------------------------------------------------------

    def _finish_batch(self, step: LaunchedStep) -> Sampled:
        """Wait for a batched prefill; returns first tokens. If it fails, prefills one by one."""
        sampled = None
        if step.logits is not None:
            with self._record_batch_error(step.failures):
                sampled = self._groups.join(step.batch, step.logits)
        if sampled is None:
            return self._prefill_one_by_one(step.plan, step.failures)
        self._joined_prompts |= step.batch
        return self._fail_unsampled(sampled, step.failures)

    @contextmanager
    def _record_batch_error(self, failures: StepFailures) -> Iterator[None]:
        """Record an error in the block, which ends no request."""
        try:
            yield
        except Exception as error:
            logger.exception("a batched prefill failed")
            failures.record(error)
            self._errors.attribute_to_others()

    def _prefill_one_by_one(self, plan: SchedulerOutput, failures: StepFailures) -> Sampled:
        """Prefill all prompts of a plan from the beginning; returns their first tokens."""
        sampled = Sampled()
        for chunk in plan.prefills:
            with self._loaded.position_lock:
                logits = self._launch_chunk(plan, chunk, None, failures)
            sampled.add(self._finish_chunk(chunk, logits, failures))
        return sampled
