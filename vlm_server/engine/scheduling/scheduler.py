"""Decides what each step does, and turns what it brought into events.

Knows requests, their order and their limits; knows neither how a model runs nor who asked.
The heart of the engine is three beats:

    plan = scheduler.schedule()
    result = runner.execute(plan)
    events = scheduler.update(plan, result)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from vlm_server.cache.caches import Caches, EncodedImage
from vlm_server.engine.memory.admission import Admission
from vlm_server.engine.request.detokenizer import Decoder
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduling.arbiter import EncoderPrefillArbiter
from vlm_server.engine.scheduling.chunk_sizer import ChunkSizer
from vlm_server.engine.scheduling.limits import SchedulerConfig
from vlm_server.engine.scheduling.preparer_queue import PreparerQueue
from vlm_server.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    MemoryExceeded,
    OutOfMemory,
    RequestError,
)
from vlm_server.ports import (
    EncodeWork,
    NewRequest,
    PrefillWork,
    PreparedPrompt,
    SchedulerOutput,
    SeqId,
    StepResult,
    TokenScore,
)
from vlm_server.protocol import (
    Accepted,
    CacheStats,
    Delta,
    Event,
    Failed,
    Finished,
    Submit,
    TokenLogprob,
    Tokens,
    TokenText,
)


class Scheduler:
    """First come, first served, as `FairQueue` has it; a step decodes all and prefills a chunk.

    All methods are called from the inference thread. A request is tracked from `add` to its
    terminal event, and nowhere after it. The rows of a request join together, so it waits until
    there is room for all of them, and those that came later wait behind it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        decoder: Decoder,
        caches: Caches | None = None,
        admission: Admission | None = None,
    ) -> None:
        """Without an `admission` all are let in, whatever memory there is."""
        self._config = config
        self._decoder = decoder
        self._caches = caches or Caches.of()
        self._admission = admission
        self._chunk_sizer = ChunkSizer(config.max_step_seconds, config.prefill_chunk_tokens)
        self._requests: dict[str, Request] = {}
        self._turns = EncoderPrefillArbiter(self._requests, config.max_num_seqs)
        self._preparer_queue = PreparerQueue(config.max_preparing, config.max_num_seqs)
        self._released: list[SeqId] = []
        self.is_draining = False
        self.num_generated_tokens = self.num_prompt_tokens = self.num_cached_tokens = 0

    def reset_stats(self) -> None:
        """Count from zero, and forget what is cached: what ran so far was no user's."""
        self.num_generated_tokens = self.num_prompt_tokens = self.num_cached_tokens = 0
        self._caches.begin_serving()

    # ---- what comes in -------------------------------------------------------------

    def add(self, submit: Submit) -> list[Event]:
        """Take a request in. Answers `Accepted`, or `Failed` while draining or for its fault."""
        refusal = self._config.refusal(submit.sampling)
        if self.is_draining:
            refusal = EngineUnavailable("the server is shutting down")
        if refusal:
            return [_failed(submit.request_id, refusal)]
        request = Request(submit, self._config.with_defaults(submit.sampling), self._decoder)
        self._requests[submit.request_id] = request
        return [Accepted(submit.request_id)]

    def abort(self, request_id: str) -> list[Event]:
        """End a request in whatever state it is. An unknown or finished one is no error."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        request.move_to(State.FINISHED_ABORTED)
        self._forget(request)
        return [Finished(request_id, request.usage, is_aborted=True)]

    def prepared(self, request_id: str, outcome: PreparedPrompt | RequestError) -> list[Event]:
        """A preparer is done with a request, which may have been aborted meanwhile."""
        self._preparer_queue.end(request_id)
        request = self._requests.get(request_id)
        if isinstance(outcome, RequestError):
            return [] if request is None else self._fail(request, outcome)
        if request is None:
            outcome.release()
            return []
        try:
            wanted = request.sampling.max_tokens
            room = self._config.room_for_answer(outcome.num_tokens, wanted)
        except ContextLengthExceeded as error:
            outcome.release()
            return self._fail(request, error)
        request.take_prompt(outcome, room)
        request.is_admitted = self._admission is None
        return []

    def admit(self) -> list[Event]:
        """Let in, in order, whom there is device memory for; those behind one that waits wait."""
        if self._admission:
            self._admission.make_room_for_reserved(self._admitted())
        events = list[Event]()
        is_settled = not self._released and self._turns.with_encoder <= self._requests.keys()
        for request in list(self._in_state(State.PREFILL)):
            if request.is_admitted or self._admission is None:
                continue
            try:
                if not self._admission.admit(request, self._admitted(), is_settled=is_settled):
                    break
            except MemoryExceeded as error:
                events += self._fail(request, error)
            else:
                request.is_admitted, request.is_waiting_for_memory = True, False
        return events

    def encoded(self, request_id: str, outcome: EncodedImage | RequestError) -> list[Event]:
        """The encoder is done with a request's next picture."""
        mm_hash = self._turns.take_back_encoder(request_id)
        request = self._requests.get(request_id)
        if isinstance(outcome, RequestError):
            if request is None or self._tries_again(request, outcome):
                return []
            return self._fail(request, outcome)
        features = self._caches.store_features(mm_hash, outcome)
        if request is None:
            features.release()
        else:
            request.take_features(features)
        return []

    # ---- what goes out -------------------------------------------------------------

    def start_preparing(self) -> list[Submit]:
        """Requests that a preparer should take now, oldest first: some with media, some without."""
        return self._preparer_queue.start(self._requests.values())

    def start_encoding(self) -> EncodeWork | None:
        """The picture that the encoder should take now.

        None also if it is a prompt's turn; see `EncoderPrefillArbiter`.
        """
        return self._start_encoding(None)

    def start_encoding_behind(self, plan: SchedulerOutput) -> EncodeWork | None:
        """The picture that the encoder should take as soon as the chunk of `plan` is launched.

        None unless that ends a prompt with media: the host needs a while to launch an encode, and
        the device need not wait for it.
        """
        if plan.prefill is None or not plan.prefill.is_last:
            return None
        ending = self._requests[plan.prefill.request_id]
        return self._start_encoding(ending) if ending.has_media_left else None

    def _start_encoding(self, beside: Request | None) -> EncodeWork | None:
        while request := self._turns.next_to_encode(beside):
            if self._is_known_by_now(request):
                continue
            if beside and not self._fit_together(request, beside):
                return None
            assert request.prompt is not None
            image_index = len(request.features)
            self._turns.give_encoder(request, request.prompt.images[image_index].mm_hash)
            return EncodeWork(request.request_id, image_index, request.prompt)
        return None

    def _fit_together(self, *requests: Request) -> bool:
        return self._admission is None or self._admission.fit_together(requests, self._admitted())

    def schedule(self) -> SchedulerOutput:
        """The next step. Empty if there is nothing that the runner could do."""
        decoding = tuple(row for r in self._in_state(State.DECODE) for row in r.rows)
        released, self._released = tuple(self._released), []
        request = self._turns.next_to_prefill()
        if request is None:
            return SchedulerOutput(released=released, decode=decoding)
        assert request.prompt is not None
        self._turns.give_chunk(request)
        new = () if request.is_known_to_runner else (self._hand_over(request),)
        chunk = self._next_chunk(request, request.prompt, others_wait=bool(decoding))
        return SchedulerOutput(released, new, decoding, chunk)

    def update(self, plan: SchedulerOutput, result: StepResult) -> list[Event]:
        """What a step brought: one `Tokens` for all, then terminal events."""
        self._advance(plan, result)
        deltas, finished, events = [], [], list[Event]()
        for row, token_id in result.tokens.items():
            request = self._requests.get(row.request_id)
            if request is None or row.request_id in result.failures:
                continue
            deltas.append(self._take_token(request, row, token_id, result.logprobs.get(row)))
            if request.state.is_finished:
                finished.append(request)
        if deltas:
            events.append(Tokens(tuple(deltas)))
        for request in finished:
            self._forget(request)
            events.append(Finished(request.request_id, request.usage))
        for request_id, error in result.failures.items():
            if request := self._requests.get(request_id):
                events += self._fail(request, error)
        return events

    # ---- what it holds -------------------------------------------------------------

    def count(self, state: State) -> int:
        return sum(1 for _ in self._in_state(state))

    @property
    def num_tracked(self) -> int:
        """Everything that is remembered of any request; 0 when idle."""
        elsewhere = self._preparer_queue.request_ids | self._turns.with_encoder
        return len(self._requests.keys() | elsewhere) + len(self._released)

    @property
    def cache_stats(self) -> tuple[CacheStats, ...]:
        return self._caches.read()

    @property
    def is_short_of_memory(self) -> bool:
        """Whether a request waits to be let in."""
        return any(r.is_waiting_for_memory for r in self._requests.values())

    @property
    def has_first_token_due(self) -> bool:
        """Whether somebody who was let in, or may be, waits for the first token of an answer."""
        return any(
            r.state is not State.DECODE and not r.is_waiting_for_memory
            for r in self._requests.values()
        )

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def has_runner_work(self) -> bool:
        """Whether `schedule` has something for the runner."""
        decodes = any(True for _ in self._in_state(State.DECODE))
        return bool(self._released) or decodes or self._turns.next_to_prefill() is not None

    # ---- inside --------------------------------------------------------------------

    def _in_state(self, state: State) -> Iterator[Request]:
        return (request for request in self._requests.values() if request.state is state)

    def _admitted(self) -> list[Request]:
        return [request for request in self._requests.values() if request.is_admitted]

    def _is_known_by_now(self, request: Request) -> bool:
        """Take the request's next picture from a cache that had it not yet when it was prepared."""
        self._match_prefix(request)
        if not request.needs_encoding:
            return True
        assert request.prompt is not None
        mm_hash = request.prompt.images[len(request.features)].mm_hash
        if mm_hash not in self._caches.features:
            return False
        features = self._caches.features.lease(mm_hash)
        if features is not None:
            request.take_features(features)
        return features is not None

    @staticmethod
    def _tries_again(request: Request, error: RequestError) -> bool:
        """Whether to encode once more: for want of memory, which may have been freed since."""
        again = isinstance(error, OutOfMemory) and not request.has_run_out
        request.has_run_out = request.has_run_out or again
        return again

    def _match_prefix(self, request: Request) -> None:
        """Look again how much of a prompt is known that the runner has not met yet."""
        prompt = request.prompt
        assert prompt is not None
        if prompt.prefix is None:
            return
        prefix = self._caches.prefixes.improve(
            prompt.prefix,
            prompt.elements,
            prompt.num_tokens - 1,
            prompt.cache_salt,
            prompt.atomic_prefill_tokens,
        )
        if prefix is not prompt.prefix:
            request.take_prefix(prefix)

    def _hand_over(self, request: Request) -> NewRequest:
        self._match_prefix(request)
        assert request.prompt is not None
        self.num_prompt_tokens += request.prompt.num_tokens
        self.num_cached_tokens += request.num_cached_tokens
        return request.hand_over()

    def _next_chunk(
        self, request: Request, prompt: PreparedPrompt, *, others_wait: bool
    ) -> PrefillWork:
        start = request.num_prefilled
        end = start + self._chunk_sizer.chunk_tokens(
            prompt.num_tokens - start, others_wait=others_wait
        )
        snapshot_points = prompt.snapshot_points[bisect_right(prompt.snapshot_points, start) :]
        end = max(prompt.atomic_prefill_tokens, min([end, *snapshot_points[:1]]))
        return PrefillWork(request.request_id, start, end, is_last=end == prompt.num_tokens)

    def _advance(self, plan: SchedulerOutput, result: StepResult) -> None:
        """Note the progress of the prompt whose chunk was prefilled."""
        request = self._requests.get(plan.prefill.request_id) if plan.prefill else None
        if request and plan.new:
            request.release()
        if request is None or plan.prefill is None or request.request_id in result.failures:
            return
        self._chunk_sizer.note(plan.prefill.end - plan.prefill.start, result.prefill_seconds)
        request.num_prefilled = plan.prefill.end
        if plan.prefill.is_last:
            request.move_to(State.DECODE)

    def _take_token(
        self, request: Request, row: SeqId, token_id: int, score: TokenScore | None
    ) -> Delta:
        """What a token brings to its choice; a choice that ends gives its row back."""
        text = request.take_token(row, token_id, self._config.eos_token_ids)
        self.num_generated_tokens += 1
        reason = request.choices[row.choice].finish_reason
        if reason is not None:
            self._released.append(row)
        logprobs = self._logprobs(token_id, score)
        return Delta(row.request_id, text, logprobs, row.choice, reason)

    def _logprobs(self, token_id: int, score: TokenScore | None) -> tuple[TokenLogprob, ...]:
        if score is None:
            return ()
        token = self._token_text(token_id, score.logprob)
        return (TokenLogprob(token, tuple(self._token_text(*top) for top in score.top)),)

    def _token_text(self, token_id: int, logprob: float) -> TokenText:
        return TokenText(self._decoder.decode([token_id], skip_special_tokens=False), logprob)

    def _fail(self, request: Request, error: RequestError) -> list[Event]:
        request.move_to(State.FINISHED_FAILED)
        self._forget(request)
        return [_failed(request.request_id, error)]

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        request.release()
        if request.is_known_to_runner:
            self._released += request.rows


def _failed(request_id: str, error: RequestError) -> Failed:
    return Failed(request_id, error.code, error.message, error.param)
