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
from dataclasses import dataclass, field

import mlx.core as mx

from vlm_server.errors import InternalError, RequestError
from vlm_server.interfaces import PrefillWork, PreparedPrompt, SchedulerOutput, StepResult
from vlm_server.runner.decode.decode_groups import DecodeGroups
from vlm_server.runner.decode.sequence import Sampled
from vlm_server.runner.decode.speculation import speculation_of
from vlm_server.runner.kv.prompt_kv import PromptKV
from vlm_server.runner.kv.segments import StateSize
from vlm_server.runner.loaded import LoadedModel
from vlm_server.runner.prefill.batched_prefill import launch_batched
from vlm_server.runner.prefill.prefill import Prefill
from vlm_server.runner.prefix_writer import LateErrors, PrefixStore, PrefixWriter
from vlm_server.runner.sampling import NO_TOKEN

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LaunchedStep:
    """The `Step` of a `ModelRunner`."""

    runner: ModelRunner
    plan: SchedulerOutput
    failures: dict[str, RequestError] = field(default_factory=dict)
    """The requests that fail in it."""
    error: str | None = None
    """The last error of the model or the device."""
    logits: mx.array | None = None
    """Logits of the last token of the chunk, or of each prompt of a batched prefill, (prompts,
    vocabulary), lazy; None without a chunk, or if it failed."""
    batched: Mapping[str, PromptKV] = field(default_factory=dict)
    """The prompts of a batched prefill, by request."""
    prefill_started: float = 0.0
    """The start of launching the chunk, by `time.perf_counter`."""
    is_mixed: bool = False
    """Whether the chunk is part of the decode step."""

    def result(self) -> StepResult:
        """Never raises for a request's fault: see `StepResult.failures`."""
        return self.runner.finish(self)


class ModelRunner:
    """Holds the KV cache of every request: prompts being prefilled, and sequences that decode."""

    def __init__(
        self, loaded: LoadedModel, prefixes: PrefixStore, num_draft_tokens: int = 0
    ) -> None:
        """`num_draft_tokens`: the most drafts of a sequence that a step verifies; 0 for none."""
        self._loaded = loaded
        self._prefills: dict[str, Prefill] = {}
        self._joined: dict[str, PromptKV] = {}
        """Prompts whose sequences have joined since the last launch; the next plan stores them."""
        self._state_size: StateSize | None = None
        self._groups = DecodeGroups(loaded, speculation_of(loaded, num_draft_tokens))
        self._errors = LateErrors(loaded.faults, self._groups)
        self._prefixes = PrefixWriter(prefixes, self._groups, loaded.faults, self._errors)

    @property
    def num_tracked(self) -> int:
        return len(self._prefills) + len(self._groups.seq_ids)

    def kv_bytes(self, num_tokens: int) -> int:
        return 0 if self._state_size is None else self._state_size.bytes_for(num_tokens)

    def max_piggybacked_tokens(self, prompt: PreparedPrompt, num_seqs: int) -> int:
        if prompt.atomic_prefill_tokens or prompt.token_types is not None:
            return 0
        return self._loaded.text.max_piggybacked_tokens(num_seqs, has_media=bool(prompt.spans))

    def launch(self, plan: SchedulerOutput) -> LaunchedStep:
        """Begin one decode step and one chunk. Never raises for a request's fault."""
        self._errors.attribute_to_others()
        step = LaunchedStep(self, plan)
        with self._loaded.position_lock:
            if plan.finished_seqs:
                self._remove_finished(plan)
            chunk_logits = self._launch_decode(step)
            if not plan.finished_seqs:
                self._store(plan)  # while the device decodes
            self._joined = {}
            if plan.prefill is not None:
                self.synchronize()
            step.prefill_started = time.perf_counter()
            if plan.batched_prefills:
                with self._batched_faults(step):
                    step.batched, step.logits = launch_batched(self._loaded, plan.new)
            else:
                self._launch_prefill(step, chunk_logits)
        return step

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
        reading_since = time.perf_counter()
        sampled = self._read_decode(step)
        read_seconds = time.perf_counter() - reading_since  # the chunk had not begun on the device
        if step.plan.batched_prefills:
            sampled.add(self._finish_batched(step))
        else:
            sampled.add(self._finish_prefill(step))
        seconds = time.perf_counter() - step.prefill_started - read_seconds
        return StepResult(
            sampled.tokens,
            step.failures,
            sampled.logprobs,
            sampled.drafts,
            prefill_seconds=None if step.is_mixed else seconds,
            error=step.error,
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
            if joined := self._joined.get(request_id):
                self._prefixes.store_prompt(joined)
            elif prefill := self._prefills.get(request_id):
                self._prefixes.store_cancelled(prefill)
        for seq in plan.stored_answers:
            self._prefixes.store_answer(seq)

    def _fail(
        self, step: LaunchedStep, error: Exception, request_ids: tuple[str, ...], message: str
    ) -> None:
        """End these requests with `error`, described by `message` unless it is a usual one."""
        step.error = f"{type(error).__name__}: {error}"
        failure = self._loaded.faults.request_error(error, message)
        step.failures |= dict.fromkeys(request_ids, failure)

    # ---- decode --------------------------------------------------------------------

    def _launch_decode(self, step: LaunchedStep) -> mx.array | None:
        """Begin a decode step; returns the chunk's logits if it is a mixed one."""
        plan, work = step.plan, self._piggybacked(step.plan)
        assert set(plan.decode) == set(self._groups.seq_ids)
        chunk, logits = None, None
        if work is not None:
            with self._chunk_faults(step, work):
                chunk = self._prefill_of(plan, work).chunk(work.start, work.end)
        try:
            logits = self._groups.launch(is_alone=plan.prefill is None, chunk=chunk)
        except Exception as error:
            logger.exception("a decode step of %d sequences failed", len(plan.decode))
            self._fail_decode(step, error)
            if chunk is not None and work is not None:  # the chunk may be half done
                self._end_prefill(work.request_id, error, step)
        step.is_mixed = logits is not None
        return logits

    def _piggybacked(self, plan: SchedulerOutput) -> PrefillWork | None:
        """The plan's chunk, if the decode step may be a mixed one."""
        work = plan.prefill
        if work is None or plan.batched_prefills or not plan.decode:
            return None
        prompts = {request.request_id: request.prompt for request in plan.new}
        prompt = prompts.get(work.request_id) or self._prefills[work.request_id].kv.prompt
        if work.num_tokens > self.max_piggybacked_tokens(prompt, len(plan.decode)):
            return None  # the host better builds the chunk while the device decodes
        return work

    def _read_decode(self, step: LaunchedStep) -> Sampled:
        try:
            sampled = self._groups.result()
            self._errors.check()
        except Exception as error:
            logger.exception("a decode step of %d sequences failed", len(step.plan.decode))
            self._fail_decode(step, error)
            return Sampled()
        return self._without_unsampled(sampled, step)

    def _fail_decode(self, step: LaunchedStep, error: Exception) -> None:
        """End all sequences, and the prompts whose latest chunk was part of a mixed step."""
        seqs = step.plan.decode
        request_ids = tuple(seq.request_id for seq in seqs)
        self._fail(step, error, request_ids, "The model failed while decoding.")
        self._groups.remove(seqs)
        self._joined = {}
        for request_id, prefill in list(self._prefills.items()):
            if prefill.is_piggybacked:
                self._end_prefill(request_id, error, step)

    def _without_unsampled(self, sampled: Sampled, step: LaunchedStep) -> Sampled:
        """Remove the sequences of `sampled` that got no token, without storing them."""
        for seq in [seq for seq, tokens in sampled.tokens.items() if NO_TOKEN in tokens]:
            del sampled.tokens[seq]
            fault = self._groups.fault(seq)
            if fault is None:
                logger.error("a sequence's scores are not finite: no token can be sampled")
                fault = InternalError("The model's scores for the next token are NaN.")
            step.failures[seq.request_id] = fault
            self._groups.remove([seq])
        return sampled

    # ---- prefill -------------------------------------------------------------------

    def _launch_prefill(self, step: LaunchedStep, chunk_logits: mx.array | None) -> None:
        """Begin the plan's chunk; `chunk_logits` are those of a mixed step that did so."""
        work = step.plan.prefill
        if work is not None and work.request_id not in step.failures:
            with self._chunk_faults(step, work):
                prefill = self._prefill_of(step.plan, work)
                step.logits = prefill.launch(work.start, work.end, chunk_logits)

    def _prefill_of(self, plan: SchedulerOutput, work: PrefillWork) -> Prefill:
        for request in plan.new:
            if request.request_id == work.request_id and request.request_id not in self._prefills:
                self._prefills[request.request_id] = Prefill(self._loaded, request)
        return self._prefills[work.request_id]

    def _finish_prefill(self, step: LaunchedStep) -> Sampled:
        """Wait for a chunk; after the last one, let the request's sequences join.

        Returns their first tokens. A mixed step's result has waited for its chunk.
        """
        work, sampled = step.plan.prefill, None
        if work is None or step.logits is None or work.request_id in step.failures:
            return Sampled()
        prefill = self._prefills[work.request_id]
        kv = prefill.kv
        with self._chunk_faults(step, work):
            if work.is_last:
                sampled = self._groups.join({work.request_id: kv}, step.logits)
                self._state_size = self._state_size or StateSize(kv.cache, kv.prompt.num_tokens)
            elif not step.is_mixed:
                prefill.wait()
        if sampled is None:
            return Sampled()
        del self._prefills[work.request_id]
        self._joined[work.request_id] = kv
        return self._without_unsampled(sampled, step)

    @contextmanager
    def _chunk_faults(self, step: LaunchedStep, work: PrefillWork) -> Iterator[None]:
        """End the request of `work` with an error in the block."""
        try:
            yield
        except Exception as error:
            logger.exception("prefilling tokens %d to %d failed", work.start, work.end)
            self._end_prefill(work.request_id, error, step)

    def _end_prefill(self, request_id: str, error: Exception, step: LaunchedStep) -> None:
        """End a request whose chunk failed; nothing of its prompt is stored."""
        self._prefills.pop(request_id, None)
        self._fail(step, error, (request_id,), "The model failed while prefilling the prompt.")
        self._errors.attribute_to_others()

    # ---- batched prefill -----------------------------------------------------------

    def _finish_batched(self, step: LaunchedStep) -> Sampled:
        """Wait for a batched prefill; returns first tokens. If it fails, prefills one by one."""
        sampled = None
        if step.logits is not None:
            with self._batched_faults(step):
                sampled = self._groups.join(step.batched, step.logits)
        if sampled is None:
            return self._prefill_one_by_one(step)
        self._joined |= step.batched
        return self._without_unsampled(sampled, step)

    @contextmanager
    def _batched_faults(self, step: LaunchedStep) -> Iterator[None]:
        """Record an error in the block, which ends no request."""
        try:
            yield
        except Exception as error:
            logger.exception("a batched prefill of %d prompts failed", len(step.plan.new))
            self._fail(step, error, (), "")
            self._errors.attribute_to_others()

    def _prefill_one_by_one(self, step: LaunchedStep) -> Sampled:
        """Prefill all prompts of a plan from the beginning; returns their first tokens."""
        sampled = Sampled()
        for request, work in zip(step.plan.new, step.plan.prefills, strict=True):
            alone = LaunchedStep(
                self, SchedulerOutput(new=(request,), prefill=work), step.failures, step.error
            )
            with self._loaded.position_lock:
                self._launch_prefill(alone, None)
            sampled.add(self._finish_prefill(alone))
            step.error = alone.error
        return sampled
