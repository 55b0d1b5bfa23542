"""Accepts requests, plans each step (`schedule`), and makes events of its result (`update`).

`engine.loop` drives the steps and passes messages on. `Planner` decides and starts the work, the
scheduler handles its results; nothing else changes a request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tokenizers import Tokenizer

from vlm_server.cache.caches import Caches, EncodedImage
from vlm_server.cache.disk.tier import DiskReadResult
from vlm_server.engine.memory.admission import Admission
from vlm_server.engine.request.request import Request, group_id_of
from vlm_server.engine.request.states import LIVE, State
from vlm_server.engine.scheduler.config import SchedulerConfig
from vlm_server.engine.scheduler.live_requests import LiveRequests
from vlm_server.engine.scheduler.output_processor import OutputProcessor
from vlm_server.engine.scheduler.planner import Planner
from vlm_server.engine.scheduler.pooling_groups import PoolingGroups, Result
from vlm_server.engine.scheduler.stats import SchedulerStats
from vlm_server.errors import (
    ContextLengthExceeded,
    DeviceLimit,
    EngineUnavailable,
    InvalidRequest,
    OutOfMemory,
    RequestError,
    StepTooLong,
)
from vlm_server.interfaces import (
    EncodeWork,
    Prepared,
    PreparedPrompt,
    SchedulerOutput,
    SeqId,
    StepResult,
)
from vlm_server.protocol import Accepted, Delta, Event, Failed, Finished, Submit, Tokens, Usage

_MAX_RETRIES = {OutOfMemory.code: 1, StepTooLong.code: 3}
"""Retries of a request's encodes and prefill, by the error's code."""


class Scheduler:
    """The live requests, from `add` to the terminal event of each.

    All calls come from the inference thread.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        decoder: Tokenizer,
        caches: Caches,
        admission: Admission,
        pixels_to_decode: Callable[[Submit], int],
        piggyback_tokens: Callable[[PreparedPrompt, int], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """pixels_to_decode: the number of pixels of a request's images, for `PreparerOrder`.

        piggyback_tokens: see `interfaces.Runner.max_piggybacked_tokens`.
        """
        self._clock = clock
        self._config = config
        self._pixels_to_decode = pixels_to_decode
        self._decoder = decoder
        self._output = OutputProcessor(decoder, config.eos_token_ids)
        self._caches = caches
        self._admission = admission
        self._requests = LiveRequests()
        is_multi = config.vectors is not None and config.vectors.is_multi
        self._groups = PoolingGroups(clock, is_multi=is_multi, of_pairs=config.scores_pairs)
        self._planner = Planner(config, self._requests, caches, admission, piggyback_tokens, clock)
        self._is_draining = False
        self.reset_stats()

    # ---- messages: requests, and results of other threads ----------------------------

    def add(self, submit: Submit) -> list[Event]:
        """`Accepted`; or `Failed`, while draining or for sampling parameters out of range."""
        if self._is_draining:
            error = EngineUnavailable("The server is shutting down.")
            return [_failed_event(submit.request_id, error)]
        try:
            self._config.check_task(submit)
            self._config.check_sampling(submit.sampling)
        except InvalidRequest as error:
            return [_failed_event(submit.request_id, error)]
        if submit.pooling is None:
            self._enqueue(submit)
        else:
            self._groups.open(submit)
            self._enqueue_inputs(submit.request_id)
        return [Accepted(submit.request_id)]

    def abort(self, request_id: str) -> list[Event]:
        """End a request in any state. An unknown or finished one is no error.

        Its sequences leave the batch with the next plan (`SchedulerOutput.finished_seqs`).
        """
        if request_id in self._groups:
            return [Finished(request_id, self._abort_inputs(request_id), is_aborted=True)]
        request = self._requests.get(request_id)
        if request is None:
            return []
        self._end(request, State.FINISHED_ABORTED)
        return [Finished(request_id, request.usage, is_aborted=True)]

    def on_prepared(self, request_id: str, outcome: Prepared | RequestError) -> list[Event]:
        """Handle a prepared request, which may have been aborted since."""
        self._planner.on_prepared(request_id)
        request = self._end_thread_work(request_id)
        if isinstance(outcome, RequestError):
            return [] if request is None else self._fail(request, outcome)
        if request is None:
            outcome.references.release()
            return []
        if request.count_only:
            return self._count(request, outcome)
        if outcome.vectors is not None:
            request.finish_cached(outcome)
            return self._end_input(request, outcome.vectors)
        try:
            if request.pooling is not None:
                self._config.check_length(outcome.prompt)
                request.logit_bytes = self._config.logit_bytes
                request.on_prepared(outcome, max_tokens=0)
                return []
            max_tokens = self._config.max_answer_tokens(outcome.prompt, request.sampling.max_tokens)
        except ContextLengthExceeded as error:
            outcome.references.release()
            return self._fail(request, error)
        request.on_prepared(outcome, max_tokens, self._config.formats)
        return []

    def on_disk_read(self, request_id: str, result: DiskReadResult) -> None:
        """Handle the disk read of a request, which may have been aborted since."""
        self._planner.on_disk_read()
        request = self._end_thread_work(request_id)
        if request is None:
            result.release()
        else:
            request.on_disk_read(result)

    def on_encoded(
        self,
        encodes: Sequence[EncodeWork],
        outcomes: Sequence[EncodedImage | RequestError],
        seconds: float | None,
    ) -> list[Event]:
        """Handle the features of `encodes`; see `EncodeDone`."""
        self._planner.on_encoded(encodes, seconds)
        events, retried = list[Event](), set[str]()
        for encode, outcome in zip(encodes, outcomes, strict=True):
            request_id = encode.request_id
            if isinstance(outcome, DeviceLimit) and (
                request_id in retried or self._may_retry(request_id, outcome)
            ):
                retried.add(request_id)  # counts once for all media of the request
            else:
                events += self._add_features(encode, outcome)
        return events

    def _add_features(self, work: EncodeWork, outcome: EncodedImage | RequestError) -> list[Event]:
        """Store features of a request that may have been aborted since."""
        request = self._requests.get(work.request_id)
        if isinstance(outcome, RequestError):
            return [] if request is None else self._fail(request, outcome)
        lease = self._caches.store_features(work.span.mm_hash, outcome)
        if request is None:
            lease.release()
        else:
            request.on_encoded(work.span_index, lease)
        return []

    def expire(self) -> list[Event]:
        """End the requests that have missed a deadline, in any state."""
        now = self._clock()
        missed = [(r, r.deadlines.error_at(now)) for r in self._requests.values()]
        return [
            event
            for request, error in missed
            if error and request.request_id in self._requests  # else ended with another input
            for event in self._fail(request, error)
        ]

    def drain(self) -> None:
        """Refuse further requests."""
        self._is_draining = True

    # ---- a step --------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """The next step; see `SchedulerOutput`."""
        plan = self._planner.plan(is_draining=self._is_draining)
        for new in plan.new:
            self._counts.add_started(self._requests[new.request_id])
        return plan

    def update(self, plan: SchedulerOutput, result: StepResult) -> list[Event]:
        """The events of a step: one `Tokens` for all, then terminal events."""
        self._advance(plan, result)
        deltas, finished, events = list[Delta](), [], list[Event]()
        for seq in result.tokens:
            request = self._requests.get(seq.request_id)
            if request is None or seq.request_id in result.failures:
                continue
            deltas += self._append_tokens(request, seq, result)
            if request.state.is_finished:
                finished.append(request)
        if deltas:
            events.append(Tokens(tuple(deltas)))
        for request in finished:
            self._end(request, request.state)
            events.append(_finished_event(request))
        for request_id, rows in result.pooled.items():
            if request := self._requests.get(request_id):
                request.finish_pooled()
                stored = self._caches.store_vectors(request.prompt.vector_key, rows)
                events += self._end_input(request, stored)
        for request_id, decision in result.decisions.items():
            if request := self._requests.get(request_id):
                request.finish_pooled()
                events += self._end_input(request, decision)
        for request_id, error in [*plan.refused.items(), *result.failures.items()]:
            if request := self._requests.get(request_id):
                events += self._fail_or_retry(request, error)
        return events

    # ---- readings ------------------------------------------------------------------

    def seconds_to_deadline(self) -> float:
        """Seconds until the next deadline of a request; may be infinite."""
        deadlines = (request.deadlines.next_at for request in self._requests.values())
        return max(0.0, min(deadlines, default=math.inf) - self._clock())

    def stats(self) -> SchedulerStats:
        return replace(
            self._counts,
            requests={s.value: sum(1 for _ in self._requests.in_state(s)) for s in LIVE},
            tracked=self._planner.num_tracked,
            caches=self._caches.stats(),
            progress=(
                *(r.progress for r in self._requests.values() if r.pooling is None),
                *self._groups.progress(),
            ),
            max_num_seqs=self._config.max_num_seqs,
        )

    @property
    def reserved_bytes(self) -> int:
        """Bytes of device memory that admitted requests may still allocate."""
        return self._admission.reserved_bytes(self._requests.admitted)

    def reset_stats(self) -> None:
        """Count tokens, media and tool calls from zero."""
        self._counts = SchedulerStats()

    # ---- parts of an update --------------------------------------------------------

    def _advance(self, plan: SchedulerOutput, result: StepResult) -> None:
        """Record the progress of the prompts whose chunks were prefilled."""
        self._planner.record(plan, result)
        for new in plan.new:  # the runner has copied their prefixes and features
            if request := self._requests.get(new.request_id):
                request.release_references()
        for chunk in plan.prefills:
            request = self._requests.get(chunk.request_id)
            if request is None or request.request_id in result.failures:
                continue
            request.num_prefilled = chunk.end
            request.scoring.record(chunk.branches)
            if chunk.is_last and request.pooling is None:
                request.start_decode()

    def _append_tokens(self, request: Request, seq: SeqId, result: StepResult) -> list[Delta]:
        """The deltas of a sequence's tokens; a choice that ends releases its sequence."""
        deltas = self._output.append(request, seq, result, self._clock(), self._counts)
        if request.choices[seq.choice].finish_reason is not None:
            self._planner.drop_seqs(request, [seq], kv_is_valid=True)
        return deltas

    def _fail_or_retry(self, request: Request, error: RequestError) -> list[Event]:
        """Restart a prefill that was too much for the device, with smaller chunks; else fail."""
        is_too_much = request.state is State.PREFILL and isinstance(error, DeviceLimit)
        if not (is_too_much and self._may_retry(request.request_id, error)):
            return self._fail(request, error, kv_is_valid=False)
        self._planner.drop_seqs(request, request.seqs, kv_is_valid=False)
        request.restart()
        return []

    def _may_retry(self, request_id: str, error: RequestError) -> bool:
        """Whether a request may be retried after `error`; counts the retry."""
        request = self._requests.get(request_id)
        if request is None or request.num_retries[error.code] >= _MAX_RETRIES[error.code]:
            return False
        request.num_retries[error.code] += 1
        return True

    # ---- requests ------------------------------------------------------------------

    def _enqueue(self, submit: Submit) -> None:
        sampling = self._config.with_defaults(submit.sampling)
        request = Request(submit, sampling, self._decoder, self._clock)
        request.num_pixels = self._pixels_to_decode(submit)
        self._requests.enqueue(request)

    def _enqueue_inputs(self, group_id: str) -> None:
        for submit in self._groups.next_inputs(group_id):
            self._enqueue(submit)

    def _end_input(self, request: Request, result: Result) -> list[Event]:
        """End an input with its result; returns the end of its group, if it was the last one."""
        self._end(request, request.state)
        finished = self._groups.finish(request, result)
        if finished is not None:
            return [finished]
        self._enqueue_inputs(group_id_of(request.request_id))
        return []

    def _abort_inputs(self, group_id: str) -> Usage:
        """End all inputs of a pooling request; returns its usage."""
        usage, request_ids = self._groups.close(group_id)
        for request_id in request_ids:
            if request := self._requests.get(request_id):
                self._end(request, State.FINISHED_ABORTED)
        return usage

    def _count(self, request: Request, prepared: Prepared) -> list[Event]:
        """End a request that wants only its prompt's tokens."""
        request.finish_count(prepared)
        self._end(request, request.state)
        prompt = prepared.prompt
        return [_finished_event(request, tuple(prompt.token_ids.tolist()), prompt.text)]

    def _fail(
        self, request: Request, error: RequestError, *, kv_is_valid: bool = True
    ) -> list[Event]:
        self._end(request, State.FINISHED_FAILED, kv_is_valid=kv_is_valid)
        group_id = group_id_of(request.request_id)
        if request.pooling is not None:
            self._abort_inputs(group_id)
        return [_failed_event(group_id, error)]

    def _end_thread_work(self, request_id: str) -> Request | None:
        """Clear the cancellation of finished work; returns its request if that is still live."""
        request = self._requests.get(request_id)
        if request is not None:
            request.cancellation = None
        return request

    def _end(self, request: Request, state: State, *, kv_is_valid: bool = True) -> None:
        """End a request in `state`; `kv_is_valid`: whether no step failed that wrote its KV."""
        if request.is_known_to_runner:
            self._planner.drop_seqs(request, request.seqs, kv_is_valid=kv_is_valid)
        request.end(state)
        del self._requests[request.request_id]
        self._counts.add_ended(request)


def _finished_event(request: Request, token_ids: tuple[int, ...] = (), text: str = "") -> Finished:
    """The terminal event of an answered request; with its prompt if only that was wanted."""
    return Finished(
        request.request_id,
        request.usage,
        images=request.prompt.images,
        videos=request.prompt.videos,
        documents=request.prompt.documents,
        token_ids=token_ids,
        text=text,
        timeline=request.timeline,
    )


def _failed_event(request_id: str, error: RequestError) -> Failed:
    return Failed(request_id, error.code, error.message, error.param)
