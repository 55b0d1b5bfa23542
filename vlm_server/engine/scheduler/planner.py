"""Plans each step: what is prepared, read from disk, encoded, prefilled and decoded in it.

Asks the queues, the arbiter, the batchers and admission, in the order in which requests are served,
and changes requests as the plan says. What the plan brought is for the scheduler.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from vlm_server.engine.memory.admission import Admission, Admit, Refuse, Wait
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduler.arbiter import EncoderPrefillArbiter
from vlm_server.engine.scheduler.batching.chunk_sizer import ChunkSizer
from vlm_server.engine.scheduler.batching.encode_batcher import EncodeBatcher
from vlm_server.engine.scheduler.batching.prefill_batcher import PrefillBatcher
from vlm_server.engine.scheduler.disk_queue import DiskQueue
from vlm_server.engine.scheduler.limits import SchedulerConfig
from vlm_server.engine.scheduler.preparer_queue import PreparerQueue
from vlm_server.engine.scheduler.requests import Requests
from vlm_server.errors import OutOfMemory, RequestError, StepTooLong
from vlm_server.interfaces import (
    EncodeWork,
    LoadWork,
    NewRequest,
    PrefillWork,
    PreparedPrompt,
    PrepareWork,
    SchedulerOutput,
    SeqId,
    StepResult,
)


class Planner:
    """A step decodes every running sequence and prefills one chunk of one prompt.

    Or several short prompts, where that was measured to be sooner (`PrefillBatcher`).
    `FairQueue` decides whose: the first one's, and every other time the shortest of the others.
    First is who came first; of several clients' requests, those whose turn it is (`ClientQueue`).

    The sequences of a request join the batch together, so it waits until there is room for all of
    them, and those after it wait for it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        requests: Requests,
        admission: Admission,
        tokens_beside: Callable[[PreparedPrompt, int], int],
        clock: Callable[[], float],
    ) -> None:
        """`requests` are those that are tracked: it adds and removes none.

        `tokens_beside`: see `ports.Runner.tokens_beside`.
        """
        self._requests = requests
        self._admission = admission
        self._tokens_beside = tokens_beside
        self._max_chunk_tokens = config.prefill_chunk_tokens
        self._chunk_sizer = ChunkSizer(config.max_step_seconds, config.prefill_chunk_tokens)
        self._arbiter = EncoderPrefillArbiter(requests, config.max_num_seqs)
        self._encode_batcher = EncodeBatcher(config, requests, self._arbiter, admission)
        self._prefill_batcher = PrefillBatcher(config, requests, self._arbiter, admission)
        self._encodes_beside = False
        """Whether the encode under way began beside a prompt's chunk."""
        self._preparer_queue = PreparerQueue(config.max_preparing, config.max_num_seqs, clock)
        self._disk_queue = DiskQueue()

    def plan(self, finished_seqs: tuple[SeqId, ...], *, is_draining: bool) -> SchedulerOutput:
        """All that the next step does, and what the runner drops: `finished_seqs`, which ended."""
        # Before preparing: it may send a request back to be prepared again.
        refused = self._admit_waiting(some_are_ending=bool(finished_seqs))
        prepare = self._start_preparing()
        load = self._start_load()
        encode = self._start_encode(beside=None)
        # Listed before the chunk: a prompt that ends with it decodes from the next step on.
        decode = tuple(seq for r in self._requests.in_state(State.DECODE) for seq in r.seqs)
        request = self._arbiter.next_to_prefill()
        new: tuple[NewRequest, ...] = ()
        prefill, prefill_with = None, tuple[PrefillWork, ...]()
        encode_next: tuple[EncodeWork, ...] = ()
        if request is not None:
            others = self._prefilled_with(request, others_decode=bool(decode))
            if not request.is_known_to_runner:
                new = tuple(map(self._new_request, (request, *others)))
            prefill = self._next_chunk(request, 0 if others else len(decode))
            prefill_with = tuple(self._next_chunk(one, num_decoding=0) for one in others)
            if prefill.is_last and request.has_uncached_media:
                encode_next = self._start_encode(beside=request)
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
            prefill_with=prefill_with,
            refused=refused,
            has_requests=bool(requests),
            waits_for_memory=any(r.state is State.WAITING_FOR_MEMORY for r in requests),
            waits_for_first_token=any(r.state.waits_for_first_token for r in requests),
            is_drained=is_draining and not (requests or finished_seqs),
            is_idle=not (self.num_tracked or finished_seqs),
        )

    # ---- what became of plans --------------------------------------------------------

    def note(self, plan: SchedulerOutput, result: StepResult) -> None:
        """Let the next chunks be chosen by what these took."""
        for work in plan.prefills:
            if isinstance(result.failures.get(work.request_id), OutOfMemory | StepTooLong):
                self._chunk_sizer.note_failure(work.num_tokens)
        seconds = result.prefill_seconds
        if seconds is None:
            return
        works = [work for work in plan.prefills if work.request_id in self._requests]
        if len(works) == 1 and works[0].request_id not in result.failures:
            self._chunk_sizer.note(works[0].num_tokens, seconds, works[0].start)
        if plan.new and works and works[0].is_last:
            self._prefill_batcher.note(
                [self._requests[work.request_id] for work in works],
                None if result.error else seconds,
                others_decode=bool(plan.decode),
            )

    def end_prepare(self, request_id: str) -> None:
        """A preparer is done with a request."""
        self._preparer_queue.end(request_id)

    def end_load(self) -> None:
        """The disk reader is done with what it had."""
        self._disk_queue.end()

    def end_encode(self, works: Sequence[EncodeWork], seconds: float | None) -> None:
        """The encoder is done with `works`; see `EncodeDone`."""
        self._arbiter.end_encode()
        if not self._encodes_beside:
            self._encode_batcher.note(works, seconds)

    def cancel(self, request_id: str) -> None:
        """A request has ended: nobody waits for what is prepared or read for it."""
        self._preparer_queue.cancel(request_id)
        self._disk_queue.cancel(request_id)

    @property
    def num_tracked(self) -> int:
        """Requests that are live, being prepared, read from disk or encoded."""
        known = self._requests.keys() | self._preparer_queue.request_ids
        return len(known | self._under_way)

    @property
    def _under_way(self) -> set[str]:
        """Requests that are read from disk or encoded; some may have ended."""
        loading = self._disk_queue.loading
        under_way = {work.request_id for work in self._arbiter.encoding}
        return under_way | ({loading.request_id} if loading else set())

    # ---- parts of a plan; each changes requests as the plan says ---------------------

    def _start_preparing(self) -> tuple[PrepareWork, ...]:
        work = []
        for request in self._preparer_queue.next(self._requests.values()):
            request.move_to(State.PREPARING)
            assert request.submit is not None
            cancellation = self._preparer_queue.start(request)
            work.append(PrepareWork(request.submit, cancellation, request.may_use_disk))
        return tuple(work)

    def _admit_waiting(self, *, some_are_ending: bool) -> dict[str, RequestError]:
        """Admit requests, in order, until one has to wait for memory; those after it wait, too.

        Returns those that could not even run alone: the scheduler fails them. While
        `some_are_ending`, or are still read or encoded for, they hold device memory.
        """
        self._admission.make_room_for_reserved(self._requests.admitted)
        some_are_ending |= not self._under_way <= self._requests.keys()
        refused = dict[str, RequestError]()
        for request in list(self._requests.in_state(State.WAITING_FOR_MEMORY)):
            if not self._admission.may_load(request):
                request.prepare_again()
                continue
            match self._admission.decide(
                request, self._requests.admitted, some_are_ending=some_are_ending
            ):
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

    def _prefilled_with(self, request: Request, *, others_decode: bool) -> list[Request]:
        """Whose prompts are prefilled with that of `request`; all begin alike."""
        if request.is_known_to_runner:
            return []
        request.rematch_prefix()
        together = self._prefill_batcher.together(request, others_decode=others_decode)
        start = min(one.num_cached_tokens for one in together)
        for one in together:
            one.cut_prefix(start)
        return together[1:]

    def _new_request(self, request: Request) -> NewRequest:
        request.leave_queue()
        return request.start_in_runner()

    def _next_chunk(self, request: Request, num_decoding: int) -> PrefillWork:
        """The next chunk of `request`, beside so many sequences that decode.

        It is as long as fits into their pass; where it is read by itself, as `ChunkSizer` allows.
        It ends at a snapshot point if one comes earlier. The first one covers
        `atomic_prefill_tokens`.
        """
        self._arbiter.start_chunk(request)
        prompt, start = request.prompt, request.num_prefilled
        left = request.num_prefill_tokens_left
        beside = self._tokens_beside(prompt, num_decoding) if num_decoding else 0
        size = min(beside, self._max_chunk_tokens)
        if not size:
            size = self._chunk_sizer.chunk_tokens(left, start, others_decode=num_decoding > 0)
        end = start + min(left, size)
        points = prompt.snapshot_points[bisect_right(prompt.snapshot_points, start) :]
        end = max(prompt.atomic_prefill_tokens, min([end, *points[:1]]))
        return PrefillWork(request.request_id, start, end, is_last=end == prompt.num_tokens)
