"""Plans each step: what is prepared, read from disk, encoded, prefilled and decoded in it.

Asks the orders, the batchers and admission, which only read requests, and starts the work: moves
requests to the states that the plan implies. The scheduler handles the results, and reports them
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from vlm_server.cache.caches import Caches
from vlm_server.engine.memory.admission import Admission
from vlm_server.engine.request.request import Request, input_index
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduler.batching import EncodeBatcher, PoolingBatcher, PrefillBatcher
from vlm_server.engine.scheduler.config import SchedulerConfig
from vlm_server.engine.scheduler.device_order import DeviceOrder
from vlm_server.engine.scheduler.live_requests import LiveRequests
from vlm_server.engine.scheduler.option_batcher import OptionBatcher
from vlm_server.engine.scheduler.preparer_order import PreparerOrder
from vlm_server.engine.scheduler.sizing.chunk_sizer import ChunkSizer
from vlm_server.errors import DeviceLimit, MemoryExceeded, RequestError
from vlm_server.interfaces import (
    Branches,
    DiskReadWork,
    EncodeWork,
    NewRequest,
    PrefillWork,
    PreparedPrompt,
    PrepareWork,
    SchedulerOutput,
    SeqId,
    StepResult,
)


class Planner:
    """Plans steps: each decodes all running sequences and prefills one chunk.

    `Requests` orders requests by arrival, fairly between clients. `DeviceOrder` picks whose chunk
    is prefilled: alternately the oldest request and the shortest other one. `PrefillBatcher` may
    add short prompts. All sequences of a request join the decode batch in the same step, so a
    request waits until there is room for all of them, and later requests wait for it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        requests: LiveRequests,
        caches: Caches,
        admission: Admission,
        piggyback_tokens: Callable[[PreparedPrompt, int], int],
        clock: Callable[[], float],
    ) -> None:
        """requests: the live ones, which the planner neither adds nor removes.

        piggyback_tokens: see `interfaces.Runner.max_piggybacked_tokens`.
        """
        self._requests = requests
        self._caches = caches
        self._admission = admission
        self._piggyback_tokens = piggyback_tokens
        self._encodes_in_turns = config.encodes_in_turns
        self._writes = config.writes
        self._max_chunk_tokens = config.prefill_chunk_tokens
        self._chunk_sizer = ChunkSizer(
            config.max_step_seconds,
            config.prefill_chunk_tokens,
            max_inner_points=config.max_inner_points,
        )
        self._encode_batcher = EncodeBatcher(config, requests, admission)
        self._prefill_batcher = PrefillBatcher(config, requests, admission)
        self._pooling_batcher = PoolingBatcher(config, requests, admission)
        self._option_batcher = OptionBatcher(config, requests, admission)
        self._preparer_order = PreparerOrder(config.max_preparing, config.max_num_seqs, clock)
        self._device_order = DeviceOrder(requests, config.max_num_seqs)
        self._finished_seqs: list[SeqId] = []
        """Sequences that have ended since the last plan, and that the runner still holds."""
        self._stored_prompts: list[str] = []
        """`SchedulerOutput.stored_prompts` of the next plan."""
        self._stored_answers: list[SeqId] = []
        """`SchedulerOutput.stored_answers` of the next plan."""

    def plan(self, *, is_draining: bool) -> SchedulerOutput:
        """The next step."""
        finished_seqs, self._finished_seqs = tuple(self._finished_seqs), []
        stored_prompts, self._stored_prompts = tuple(self._stored_prompts), []
        stored_answers, self._stored_answers = tuple(self._stored_answers), []
        # First, since it may send a request back to WAITING, to be prepared without the disk.
        refused = self._admit_waiting(some_are_ending=bool(finished_seqs))
        prepare = self._start_preparing()
        disk_read = self._start_disk_read()
        encode = self._start_encode(during=None)
        # Listed before the chunk: a prompt that ends with it decodes from the next step on.
        decode = tuple(seq for r in self._requests.in_state(State.DECODE) for seq in r.seqs)
        new_requests, prefills = self._start_prefills(num_decoding=len(decode))
        on_device = self._device_order.on_device(prefills, is_decoding=bool(decode))
        encode_during_step = self._start_encode_during_step(prefills)
        requests = self._requests.values()
        return SchedulerOutput(
            prepare=prepare,
            disk_read=disk_read,
            encode=encode,
            encode_during_step=encode_during_step,
            finished_seqs=finished_seqs,
            stored_prompts=stored_prompts,
            stored_answers=stored_answers,
            new=new_requests,
            decode=decode,
            prefills=prefills,
            on_device=on_device,
            on_device_during_step=self._device_order.on_device(prefills, is_decoding=bool(decode)),
            refused=refused,
            has_requests=bool(requests),
            waits_for_memory=any(r.state is State.WAITING_FOR_MEMORY for r in requests),
            waits_for_first_token=any(r.state.waits_for_first_token for r in requests),
            is_drained=is_draining and not (requests or finished_seqs),
            is_idle=not (self.num_tracked or finished_seqs),
        )

    # ---- results of plans ------------------------------------------------------------

    def record(self, plan: SchedulerOutput, result: StepResult) -> None:
        """Learn sizes from a step's prefills, and have finished prompts stored."""
        for chunk in plan.prefills:
            failure = result.failures.get(chunk.request_id)
            if isinstance(failure, DeviceLimit):
                self._record_failure(chunk)
            elif chunk.is_last and failure is None:
                request = self._requests[chunk.request_id]
                self._stored_prompts += [request.request_id] if self._can_reuse(request) else []
        prefills = [chunk for chunk in plan.prefills if chunk.request_id in self._requests]
        if prefills and result.prefill_seconds is not None:
            self._record_prefill_time(plan, result, prefills, result.prefill_seconds)

    def _record_failure(self, chunk: PrefillWork) -> None:
        """Learn smaller sizes from a chunk that was too much for the device."""
        if chunk.num_tokens:
            self._chunk_sizer.record_failure(chunk.num_tokens)
        if chunk.num_branch_tokens:
            self._option_batcher.record_failure(chunk.num_branch_tokens)

    def _record_prefill_time(
        self,
        plan: SchedulerOutput,
        result: StepResult,
        prefills: Sequence[PrefillWork],
        seconds: float,
    ) -> None:
        """Learn from the time of `prefills`, the prefills of requests that are still live."""
        is_pooling = self._requests[prefills[0].request_id].pooling is not None
        if is_pooling and not self._writes:
            if not result.error:
                self._chunk_sizer.record(plan.num_prefill_tokens, seconds)
            return
        if prefills[0].branches:
            self._record_branch_time(prefills[0], result, seconds)
            return
        if len(prefills) == 1 and prefills[0].request_id not in result.failures:
            self._chunk_sizer.record(prefills[0].num_tokens, seconds, prefills[0].start)
        are_whole_prompts = bool(plan.new) and prefills[0].is_last
        if are_whole_prompts and not is_pooling and not self._device_order.is_encoding:
            self._prefill_batcher.record(
                [self._requests[chunk.request_id] for chunk in prefills],
                None if result.error else seconds,
                others_decode=bool(plan.decode),
            )

    def _record_branch_time(self, chunk: PrefillWork, result: StepResult, seconds: float) -> None:
        """Learn from a step that scored options, if it did nothing else."""
        if not chunk.num_tokens and chunk.request_id not in result.failures:
            self._option_batcher.record(chunk.num_branch_tokens, seconds, chunk.start)

    def drop_seqs(self, request: Request, seqs: Sequence[SeqId], *, kv_is_valid: bool) -> None:
        """Have the runner drop sequences of `request` in the next plan.

        If `kv_is_valid`, their KV is stored first; of a cancelled prefill, up to its last chunk.
        A prompt whose result is no answer has no sequence, and is dropped as its first.
        """
        if request.state is State.PREFILL:
            seqs = seqs or (SeqId(request.request_id),)
        self._finished_seqs += seqs
        if not (kv_is_valid and self._can_reuse(request)):
            return
        if request.state is State.PREFILL:
            self._stored_prompts.append(request.request_id)
        else:
            self._stored_answers += seqs

    def _can_reuse(self, request: Request) -> bool:
        """Whether other prompts can begin with the KV of `request`.

        Of the documents of one query, or the questions about one conversation, which share its
        tokens, the first one is enough.
        """
        if request.pooling is not None and input_index(request.request_id) > 1:
            return False
        return self._caches.stores_prefixes and not request.prompt.is_atomic

    def on_prepared(self, request_id: str) -> None:
        """Record the end of a preparation."""
        self._preparer_order.finish(request_id)

    def on_disk_read(self) -> None:
        """Record the end of the disk read under way."""
        self._device_order.finish_disk_read()

    def on_encoded(self, encodes: Sequence[EncodeWork], seconds: float | None) -> None:
        """Record the end of an encode; see `EncodeDone`."""
        if not self._device_order.encode_overlaps_chunk:
            self._encode_batcher.record(encodes, seconds)
        self._device_order.finish_encode()

    @property
    def num_tracked(self) -> int:
        """Number of requests that are live or in work by a thread, and of finished sequences."""
        preparing, on_device = self._preparer_order.request_ids, self._device_order.under_way
        return len(self._requests.keys() | preparing | on_device) + len(self._finished_seqs)

    # ---- parts of a plan; each moves its requests ------------------------------------

    def _admit_waiting(self, *, some_are_ending: bool) -> dict[str, RequestError]:
        """Admit requests in order, until one has to wait for memory; later ones wait, too.

        Returns the errors of requests that do not fit even alone. A request whose disk read does
        not fit is prepared again without the disk (`Admission.fits_disk_read`). some_are_ending:
        whether ended requests still hold device memory; they do as well during their disk reads
        and encodes.
        """
        self._admission.make_room_for_reserved(self._requests.admitted)
        some_are_ending |= not self._device_order.under_way <= self._requests.keys()
        refused = dict[str, RequestError]()
        for request in list(self._requests.in_state(State.WAITING_FOR_MEMORY)):
            if not self._admission.fits_disk_read(request):
                request.restart(use_disk=False)
                continue
            try:
                transient_bytes = self._admission.make_room_for(
                    request, self._requests.admitted, some_are_ending=some_are_ending
                )
            except MemoryExceeded as error:
                refused[request.request_id] = error
                continue
            if transient_bytes is None:
                break
            request.admit(transient_bytes)
        return refused

    def _start_preparing(self) -> tuple[PrepareWork, ...]:
        prepare = list[PrepareWork]()
        for request in self._preparer_order.next_to_prepare(self._requests.values()):
            self._preparer_order.start(request)
            prepare.append(request.start_prepare())
        return tuple(prepare)

    def _start_disk_read(self) -> DiskReadWork | None:
        request = self._device_order.next_to_read_disk()
        if request is None:
            return None
        self._device_order.start_disk_read(request)
        return request.start_disk_read()

    def _start_encode(self, during: Request | None) -> tuple[EncodeWork, ...]:
        """Encodes to start now, or during a chunk of `during`, one of its last."""
        request = self._next_to_encode(during)
        if request is None:
            return ()
        encodes = [request.next_encode()]
        if during is not None:
            pair = (request, during)
            if not self._admission.fit_concurrently(pair, self._requests.admitted):
                return ()
        elif not self._device_order.is_text_waiting:
            turns = self._device_order.encodes_after(request)
            encodes = self._encode_batcher.batch(encodes[0], turns)
        num_tokens = sum(encode.num_tokens for encode in encodes)
        members = [self._requests[each] for each in {encode.request_id for encode in encodes}]
        encode_bytes = self._admission.encode_bytes(num_tokens, members)
        self._device_order.start_encode(encodes, during, encode_bytes)
        for member in members:
            member.leave_queue()
        return tuple(encodes)

    def _next_to_encode(self, during: Request | None) -> Request | None:
        """The request whose media are next; those whose media are all cached by now are skipped."""
        while request := self._device_order.next_to_encode(during):
            request.rematch_caches()
            if request.state is State.ENCODING:
                return request
        return None

    def _start_encode_during_step(self, prefills: Sequence[PrefillWork]) -> tuple[EncodeWork, ...]:
        """Encodes to start once a step with `prefills` is launched.

        None beside options: as many are scored as fit into memory.
        """
        if not prefills or prefills[0].branches:
            return ()
        chunk = prefills[0]
        request = self._requests[chunk.request_id]
        most_left = chunk.num_tokens if self._encodes_in_turns else 0
        if request.prompt.num_tokens - chunk.end > most_left:
            return ()
        return self._start_encode(during=request) if request.has_uncached_media else ()

    def _start_prefills(
        self, num_decoding: int
    ) -> tuple[tuple[NewRequest, ...], tuple[PrefillWork, ...]]:
        """The requests that are new to the runner, and the chunks to prefill."""
        request = self._device_order.next_to_prefill(self._scored_after_encode())
        if request is None:
            return (), ()
        if request.is_known_to_runner:
            return (), (self._next_chunk(request, num_decoding),)
        batch = self._prefill_batch(request, others_decode=num_decoding > 0)
        new_requests = tuple(request.start_in_runner() for request in batch)
        if len(batch) == 1:
            return new_requests, (self._next_chunk(request, num_decoding),)
        return new_requests, tuple(self._whole_prompt(request) for request in batch)

    def _scored_after_encode(self) -> list[Request]:
        """Requests none of whose options fits into memory beside the encode under way."""
        if not self._device_order.is_encoding:
            return []
        encode_bytes, scoring = self._device_order.encode_bytes, self._option_batcher
        in_prefill = self._requests.in_state(State.PREFILL)
        return [r for r in in_prefill if r.is_scoring and not scoring.may_score(r, encode_bytes)]

    def _prefill_batch(self, request: Request, *, others_decode: bool) -> list[Request]:
        """`request` and those to prefill with it, all after the same number of cached tokens."""
        if request.pooling is not None and not self._writes:
            max_tokens = self._chunk_sizer.chunk_tokens(self._max_chunk_tokens, others_decode=False)
            return self._pooling_batcher.batch(request, self._inputs_besides(request), max_tokens)
        request.rematch_prefix()
        if self._device_order.is_encoding:
            return [request]
        batch = self._prefill_batcher.batch(
            request,
            self._prefills_after(request),
            self._chunk_sizer.allowed_tokens,
            others_decode=others_decode,
        )
        start = min(member.num_cached_tokens for member in batch)
        for member in batch:
            member.cut_prefix(start)
        return batch

    def _inputs_besides(self, request: Request) -> Iterator[Request]:
        """The other inputs that can be embedded now, in the order of all requests."""
        is_encoding = self._device_order.is_encoding
        for other in self._requests.in_state(State.PREFILL):
            if other is not request and not (is_encoding and other.has_uncached_media):
                yield other

    def _prefills_after(self, request: Request) -> Iterator[Request]:
        """The requests to prefill after `request`, each with its longest cached prefix by now."""
        for turn in self._device_order.prefills_after(request):
            turn.rematch_prefix()
            yield turn

    def _next_chunk(self, request: Request, num_beside: int) -> PrefillWork:
        """The next chunk of `request`, sized for `num_beside` sequences that decode beside it."""
        self._device_order.start_chunk(request)
        prompt, start = request.prompt, request.num_prefilled
        end = start
        if start < prompt.num_tokens:
            end = self._chunk_sizer.chunk_end(
                prompt,
                start,
                piggyback_tokens=self._piggyback_tokens(prompt, num_beside) if num_beside else 0,
                others_decode=num_beside > 0,
            )
        branches = self._next_branches(request, start, end, others_decode=num_beside > 0)
        is_last = end == prompt.num_tokens and request.scoring.ends_with(branches)
        return PrefillWork(request.request_id, start, end, is_last, branches)

    def _whole_prompt(self, request: Request) -> PrefillWork:
        """All that is left of the prompt of `request`, one of a batch that was sized as a whole."""
        self._device_order.start_chunk(request)
        end = request.prompt.num_tokens
        return PrefillWork(request.request_id, request.num_prefilled, end, is_last=True)

    def _next_branches(
        self, request: Request, start: int, end: int, *, others_decode: bool
    ) -> tuple[Branches, ...]:
        """The options to score after tokens `start` to `end`.

        They share a step with tokens of the prompt only if no other sequence waits for its end. A
        step without such tokens has some: `_scored_after_encode` left `request` out otherwise.
        """
        scoring, encode_bytes = self._option_batcher, self._device_order.encode_bytes
        if not request.prompt.options or end < request.prompt.num_tokens:
            return ()
        if start < end and (others_decode or not scoring.may_score(request, encode_bytes)):
            return ()
        return scoring.next_branches(
            request, others_decode=others_decode, encode_bytes=encode_bytes
        )
