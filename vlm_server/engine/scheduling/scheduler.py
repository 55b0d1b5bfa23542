"""Decides what each step does, and turns what it brought into events.

One step, which `engine.loop` drives:

    plan     = scheduler.schedule()
    launched = runner.launch(plan)
    result   = launched.result()
    events   = scheduler.update(plan, result)

Beside `schedule` and `update` there is only what comes in: `add`, `abort`, `prepared`, `loaded`,
`encoded`, `drain`; and `expire`, since time passes. Nobody else changes a request.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from copy import copy

from msgspec.structs import replace

from vlm_server.cache.caches import Caches, EncodedImage
from vlm_server.cache.disk_load import Loaded
from vlm_server.engine.memory.admission import Admission, Admit, Refuse, Wait
from vlm_server.engine.request.detokenizer import Decoder
from vlm_server.engine.request.logprobs import logprobs
from vlm_server.engine.request.output.pieces import Piece, Thought
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import LIVE, State
from vlm_server.engine.scheduling.arbiter import EncoderPrefillArbiter
from vlm_server.engine.scheduling.chunk_sizer import ChunkSizer
from vlm_server.engine.scheduling.disk_queue import DiskQueue
from vlm_server.engine.scheduling.encode_batcher import EncodeBatcher
from vlm_server.engine.scheduling.limits import SchedulerConfig
from vlm_server.engine.scheduling.preparer_queue import PreparerQueue
from vlm_server.engine.scheduling.requests import Requests
from vlm_server.engine.scheduling.stats import SchedulerStats, SpecCounts
from vlm_server.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    OutOfMemory,
    RequestError,
)
from vlm_server.ports import (
    EncodeWork,
    LoadWork,
    NewRequest,
    PrefillWork,
    Prepared,
    PrepareWork,
    SchedulerOutput,
    SeqId,
    StepResult,
    TokenScore,
)
from vlm_server.protocol import (
    Accepted,
    Delta,
    Event,
    Failed,
    Finished,
    Submit,
    Tokens,
)


class Scheduler:
    """A step decodes every running sequence and prefills one chunk of one prompt.

    `FairQueue` decides whose: the first one's, and every other time the shortest of the others.
    First is who came first; of several clients' requests, those whose turn it is (`Turns`).

    All calls come from the inference thread. A request is tracked from `add` to its terminal event.
    Its sequences join the batch together, so it waits until there is room for all of them, and
    those after it wait for it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        decoder: Decoder,
        caches: Caches,
        admission: Admission,
        pixels_to_decode: Callable[[Submit], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pixels_to_decode`: of a request's images; decides who is prepared first."""
        self._clock = clock
        self._config = config
        self._pixels_to_decode = pixels_to_decode
        self._decoder = decoder
        self._caches = caches
        self._admission = admission
        self._chunk_sizer = ChunkSizer(config.max_step_seconds, config.prefill_chunk_tokens)
        self._requests = Requests()
        self._arbiter = EncoderPrefillArbiter(self._requests, config.max_num_seqs)
        self._encode_batcher = EncodeBatcher(config, self._requests, self._arbiter, admission)
        self._encodes_beside = False
        """Whether the encode under way began beside a prompt's chunk."""
        self._preparer_queue = PreparerQueue(config.max_preparing, max_ready=config.max_num_seqs)
        self._disk_queue = DiskQueue()
        self._finished_seqs: list[SeqId] = []
        """Sequences that have ended since the last plan, and that the runner still holds."""
        self._is_draining = False
        self.reset_stats()

    # ---- what comes in -------------------------------------------------------------

    def add(self, submit: Submit) -> list[Event]:
        """`Accepted`; or `Failed`, while draining or if its sampling parameters can't be served."""
        refusal = self._config.refusal(submit.sampling)
        if self._is_draining:
            refusal = EngineUnavailable("The server is shutting down.")
        if refusal:
            return [_failed(submit.request_id, refusal)]
        sampling = self._config.with_defaults(submit.sampling)
        request = Request(submit, sampling, self._decoder, self._clock)
        request.num_pixels = self._pixels_to_decode(submit)
        self._requests.line_up(request)
        return [Accepted(submit.request_id)]

    def abort(self, request_id: str) -> list[Event]:
        """End a request in whatever state it is. An unknown or finished one is no error.

        Its sequences leave the batch with the next plan (`SchedulerOutput.finished_seqs`).
        """
        request = self._requests.get(request_id)
        if request is None:
            return []
        request.move_to(State.FINISHED_ABORTED)
        self._forget(request)
        return [Finished(request_id, request.usage, is_aborted=True)]

    def prepared(self, request_id: str, outcome: Prepared | RequestError) -> list[Event]:
        """A preparer is done with a request, which may have been aborted meanwhile."""
        self._preparer_queue.end(request_id)
        request = self._requests.get(request_id)
        if isinstance(outcome, RequestError):
            return [] if request is None else self._fail(request, outcome)
        if request is None:
            outcome.holds.release()
            return []
        if request.count_only:
            return self._count(request, outcome)
        try:
            wanted = request.sampling.max_tokens
            max_tokens = self._config.room_for_answer(outcome.prompt.num_tokens, wanted)
        except ContextLengthExceeded as error:
            outcome.holds.release()
            return self._fail(request, error)
        request.set_prepared(outcome, max_tokens, self._config.formats)
        return []

    def loaded(self, request_id: str, loaded: Loaded) -> None:
        """What the disk had of a request was read; it may have been aborted meanwhile."""
        self._disk_queue.end()
        request = self._requests.get(request_id)
        if request is None:
            loaded.release()
        else:
            request.take_loaded(loaded)

    def encoded(
        self,
        works: Sequence[EncodeWork],
        outcomes: Sequence[EncodedImage | RequestError],
        seconds: float | None,
    ) -> list[Event]:
        """The encoder is done with `works`; see `EncodeDone`."""
        self._arbiter.end_encode()
        if not self._encodes_beside:
            self._encode_batcher.note(works, seconds)
        return [
            event
            for work, outcome in zip(works, outcomes, strict=True)
            for event in self._take_features(work, outcome)
        ]

    def _take_features(self, work: EncodeWork, outcome: EncodedImage | RequestError) -> list[Event]:
        """Its request may have been aborted meanwhile."""
        request = self._requests.get(work.request_id)
        if isinstance(outcome, RequestError):
            if request is None or self._may_retry(request, outcome):
                return []
            return self._fail(request, outcome)
        lease = self._caches.store_features(work.span.mm_hash, outcome)
        if request is None:
            lease.release()
        else:
            request.add_features(work.span_index, lease)
        return []

    def expire(self) -> list[Event]:
        """End the requests that have missed a deadline, in whatever state they are."""
        now = self._clock()
        missed = [(r, r.deadlines.passed(now)) for r in self._requests.values()]
        return [event for r, error in missed if error for event in self._fail(r, error)]

    def drain(self) -> None:
        """Take no more requests."""
        self._is_draining = True

    # ---- a step --------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """All that the next step does; see `SchedulerOutput`."""
        refused = self._admit_waiting()  # may send a request back to be prepared
        prepare = self._start_preparing()
        load = self._start_load()
        encode = self._start_encode(beside=None)
        # Listed before the chunk: a prompt that ends with it decodes from the next step on.
        decode = tuple(seq for r in self._requests.in_state(State.DECODE) for seq in r.seqs)
        request = self._arbiter.next_to_prefill()
        new: tuple[NewRequest, ...] = ()
        prefill = None
        encode_next: tuple[EncodeWork, ...] = ()
        if request is not None:
            new = () if request.is_known_to_runner else (self._new_request(request),)
            prefill = self._next_chunk(request, others_decode=bool(decode))
            if prefill.is_last and request.has_uncached_media:
                encode_next = self._start_encode(beside=request)
        finished_seqs, self._finished_seqs = tuple(self._finished_seqs), []
        requests = self._requests.values()
        return SchedulerOutput(
            prepare=prepare,
            load=load,
            encode=encode,
            encode_next=encode_next,
            finished_seqs=finished_seqs,
            new=new,
            decode=decode,
            prefill=prefill,
            refused=refused,
            has_requests=bool(requests),
            waits_for_memory=any(r.state is State.WAITING_FOR_MEMORY for r in requests),
            waits_for_first_token=any(r.state.waits_for_first_token for r in requests),
            is_drained=self._is_draining and not (requests or finished_seqs),
            is_idle=not (self._num_tracked or finished_seqs),
        )

    def update(self, plan: SchedulerOutput, result: StepResult) -> list[Event]:
        """What a step brought: one `Tokens` for all, then terminal events."""
        self._advance(plan, result)
        deltas, finished, events = list[Delta](), [], list[Event]()
        for seq in result.tokens:
            request = self._requests.get(seq.request_id)
            if request is None or seq.request_id in result.failures:
                continue
            deltas += self._take_tokens(request, seq, result)
            if request.state.is_finished:
                finished.append(request)
        if deltas:
            events.append(Tokens(tuple(deltas)))
        for request in finished:
            self._forget(request)
            images, timeline = request.prompt.images, request.timeline
            events.append(
                Finished(request.request_id, request.usage, images=images, timeline=timeline)
            )
        for request_id, error in [*plan.refused.items(), *result.failures.items()]:
            if request := self._requests.get(request_id):
                events += self._fail(request, error)
        return events

    # ---- what it knows -------------------------------------------------------------

    def seconds_to_deadline(self) -> float:
        """Until `expire` will have something to do, if nothing else happens; may be infinite."""
        deadlines = (request.deadlines.next_at for request in self._requests.values())
        return max(0.0, min(deadlines, default=math.inf) - self._clock())

    def read(self) -> SchedulerStats:
        return SchedulerStats(
            requests={s.value: sum(1 for _ in self._requests.in_state(s)) for s in LIVE},
            num_tracked=self._num_tracked + len(self._finished_seqs),
            num_generated_tokens=self._num_generated_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_tool_calls=self._num_tool_calls,
            num_broken_tool_calls=self._num_broken_tool_calls,
            num_media=self._num_media,
            num_cached_media=self._num_cached_media,
            caches=self._caches.read(),
            spec=copy(self._spec),
            progress=tuple(request.progress for request in self._requests.values()),
            max_num_seqs=self._config.max_num_seqs,
        )

    @property
    def reserved_bytes(self) -> int:
        """Of device memory, what running requests may still allocate."""
        return self._admission.reserved_bytes(self._requests.admitted)

    def reset_stats(self) -> None:
        """Count tokens, media and tool calls from zero."""
        self._num_media = self._num_cached_media = 0
        self._num_tool_calls = self._num_broken_tool_calls = 0
        self._num_generated_tokens = self._num_prompt_tokens = self._num_cached_tokens = 0
        self._spec = SpecCounts()

    # ---- parts of a plan; each changes requests as the plan says ---------------------

    def _start_preparing(self) -> tuple[PrepareWork, ...]:
        work = []
        for request in self._preparer_queue.next(self._requests.values()):
            request.move_to(State.PREPARING)
            assert request.submit is not None
            cancellation = self._preparer_queue.start(request)
            work.append(PrepareWork(request.submit, cancellation, request.may_use_disk))
        return tuple(work)

    def _admit_waiting(self) -> dict[str, RequestError]:
        """Admit requests, in order, until one has to wait for memory; those after it wait, too.

        Returns those that could not even run alone: they fail in `update`. What has ended must have
        given its device memory back (`is_settled`) before a request is refused.
        """
        self._admission.make_room_for_reserved(self._requests.admitted)
        is_settled = not self._finished_seqs and self._under_way <= self._requests.keys()
        refused = dict[str, RequestError]()
        for request in list(self._requests.in_state(State.WAITING_FOR_MEMORY)):
            if not self._admission.may_load(request):
                request.prepare_again()
                continue
            match self._admission.decide(request, self._requests.admitted, is_settled=is_settled):
                case Admit(transient_bytes):
                    request.admit(transient_bytes)
                case Refuse(error):
                    refused[request.request_id] = error
                case Wait():
                    break
        return refused

    def _start_load(self) -> LoadWork | None:
        work = self._disk_queue.start(self._requests.in_state(State.LOADING))
        if work is not None:
            self._requests[work.request_id].leave_queue()
        return work

    def _start_encode(self, beside: Request | None) -> tuple[EncodeWork, ...]:
        """What the encoder should start, beside the last chunk of `beside` if there is one."""
        while request := self._arbiter.next_to_encode(beside):
            request.rematch_prefix()  # this or the next may find all that was to be encoded
            work = request.next_encode() if request.state is State.ENCODING else None
            if work is None:
                continue
            if beside and not self._admission.fit_together(
                (request, beside), self._requests.admitted
            ):
                return ()
            works = [work] if beside else self._encode_batcher.together(request, work)
            self._arbiter.start_encode(works)
            self._encodes_beside = beside is not None
            for request_id in {one.request_id for one in works}:
                self._requests[request_id].leave_queue()
            return tuple(works)
        return ()

    def _new_request(self, request: Request) -> NewRequest:
        request.rematch_prefix()
        self._num_prompt_tokens += request.prompt.num_tokens
        self._num_cached_tokens += request.num_cached_tokens
        num_media = len(request.prompt.spans)
        self._num_media += num_media
        self._num_cached_media += num_media - request.num_encoded
        request.leave_queue()
        return request.start_in_runner()

    def _next_chunk(self, request: Request, *, others_decode: bool) -> PrefillWork:
        """The next chunk of `request`, of the length that `ChunkSizer` allows.

        It ends at a snapshot point if one comes earlier. The first one covers
        `atomic_prefill_tokens`.
        """
        self._arbiter.start_chunk(request)
        prompt, start = request.prompt, request.num_prefilled
        left = request.num_prefill_tokens_left
        end = start + self._chunk_sizer.chunk_tokens(left, others_decode=others_decode)
        points = prompt.snapshot_points[bisect_right(prompt.snapshot_points, start) :]
        end = max(prompt.atomic_prefill_tokens, min([end, *points[:1]]))
        return PrefillWork(request.request_id, start, end, is_last=end == prompt.num_tokens)

    # ---- parts of an update --------------------------------------------------------

    def _advance(self, plan: SchedulerOutput, result: StepResult) -> None:
        """Note the progress of the prompt whose chunk was prefilled."""
        chunk = plan.prefill
        request = self._requests.get(chunk.request_id) if chunk else None
        if request is None or chunk is None:
            return
        if plan.new:  # the runner has copied what it needs of this request
            request.release_holds()
        if request.request_id in result.failures:
            return
        self._chunk_sizer.note(chunk.num_tokens, result.prefill_seconds)
        request.num_prefilled = chunk.end
        if chunk.is_last:
            request.move_to(State.DECODE)

    def _take_tokens(self, request: Request, seq: SeqId, result: StepResult) -> list[Delta]:
        """What a sequence's tokens bring, up to the end of its choice."""
        token_ids, deltas = result.tokens[seq], list[Delta]()
        scores: Sequence[TokenScore | None] = result.logprobs.get(seq) or [None] * len(token_ids)
        choice, num_before = request.choices[seq.choice], request.choices[seq.choice].num_generated
        for token_id, score in zip(token_ids, scores, strict=True):
            deltas += self._take_token(request, seq, token_id, score)
            if choice.finish_reason is not None:
                break
        if drafts := result.drafts.get(seq):
            num_others = len(token_ids) - drafts.num_accepted - 1  # drawn before the first draft
            num_taken = choice.num_generated - num_before
            num_accepted = min(max(num_taken - num_others, 0), drafts.num_accepted)
            choice.num_accepted += num_accepted
            choice.num_rejected += drafts.num_drafted - num_accepted
            self._spec.note(drafts.num_drafted, num_accepted)
        return deltas

    def _take_token(
        self, request: Request, seq: SeqId, token_id: int, score: TokenScore | None
    ) -> list[Delta]:
        """What a token brings to its choice; a choice that ends releases its sequence."""
        request.deadlines.take_token(self._clock())
        pieces = request.append_token(seq, token_id, self._config.eos_token_ids)
        self._num_generated_tokens += 1
        choice = request.choices[seq.choice]
        reason = choice.finish_reason
        if reason is not None:
            self._finished_seqs.append(seq)
        scores = logprobs(self._decoder, token_id, score)
        deltas = [_delta(seq, piece) for piece in pieces]
        if scores:
            deltas[0] = replace(deltas[0], logprobs=scores)
        if reason is not None:
            deltas[-1] = replace(deltas[-1], finish_reason=reason, stop=choice.stop)
        if request.sampling.reports_usage:
            deltas[-1] = replace(deltas[-1], usage=request.usage)
        return deltas

    @staticmethod
    def _may_retry(request: Request, error: RequestError) -> bool:
        """Once for each request: memory that was missing may have been freed since."""
        again = isinstance(error, OutOfMemory) and not request.has_run_out_of_memory
        request.has_run_out_of_memory = request.has_run_out_of_memory or again
        return again

    # ---- requests ------------------------------------------------------------------

    @property
    def _num_tracked(self) -> int:
        """Requests that are live, being prepared, read from disk or encoded."""
        known = self._requests.keys() | self._preparer_queue.request_ids
        return len(known | self._under_way)

    @property
    def _under_way(self) -> set[str]:
        """Requests that are read from disk or encoded; some may have ended."""
        loading = self._disk_queue.loading
        under_way = {work.request_id for work in self._arbiter.encoding}
        return under_way | ({loading.request_id} if loading else set())

    def _count(self, request: Request, prepared: Prepared) -> list[Event]:
        """End a request of which nothing but the prompt was wanted."""
        request.set_counted(prepared)
        self._forget(request)
        prompt = prepared.prompt
        token_ids = tuple(prompt.token_ids.tolist())
        return [
            Finished(
                request.request_id,
                request.usage,
                images=prompt.images,
                token_ids=token_ids,
                text=prompt.text,
                timeline=request.timeline,
            )
        ]

    def _fail(self, request: Request, error: RequestError) -> list[Event]:
        request.move_to(State.FINISHED_FAILED)
        self._forget(request)
        return [_failed(request.request_id, error)]

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        self._preparer_queue.cancel(request.request_id)
        self._disk_queue.cancel(request.request_id)
        request.release_holds()
        for choice in request.choices:
            self._num_tool_calls += choice.num_tool_calls
            self._num_broken_tool_calls += choice.num_broken_tool_calls
        if request.is_known_to_runner:
            self._finished_seqs += request.seqs  # even if only its prompt was begun


def _delta(seq: SeqId, piece: Piece) -> Delta:
    request_id, choice = seq
    match piece:
        case str():
            return Delta(request_id, piece, choice=choice)
        case Thought(text):
            return Delta(request_id, text, choice=choice, is_reasoning=True)
        case _:
            return Delta(request_id, "", choice=choice, tool_call=piece)


def _failed(request_id: str, error: RequestError) -> Failed:
    return Failed(request_id, error.code, error.message, error.param)
