"""Decides what each step does, and turns what it brought into events.

Knows requests, their order and their limits; knows neither how a model runs nor who asked.
The heart of the engine is three beats:

    plan = scheduler.schedule()
    result = runner.execute(plan)
    events = scheduler.update(plan, result)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from vlm_server.engine.detokenizer import Decoder
from vlm_server.engine.request import Request
from vlm_server.engine.states import State
from vlm_server.errors import ContextLengthExceeded, EngineUnavailable, RequestError
from vlm_server.ports import (
    EncodeWork,
    NewRequest,
    PrefillWork,
    PreparedPrompt,
    SchedulerOutput,
    StepResult,
)
from vlm_server.protocol import (
    Accepted,
    Delta,
    Event,
    Failed,
    Finished,
    SamplingParams,
    Submit,
    Tokens,
)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of one model on one machine; see the `scheduler` section of the settings."""

    max_num_seqs: int
    prefill_chunk_tokens: int
    max_preparing: int
    context_tokens: int
    eos_token_ids: frozenset[int]
    default_temperature: float
    default_top_p: float


class Scheduler:
    """First come, first served; every step decodes all rows and does one other unit of work.

    All methods are called from the inference thread. A request is tracked from `add` to its
    terminal event, and nowhere after it.
    """

    def __init__(self, config: SchedulerConfig, decoder: Decoder) -> None:
        self._config = config
        self._decoder = decoder
        self._requests: dict[str, Request] = {}
        self._with_preparer: set[str] = set()
        self._released: list[str] = []
        self.is_draining = False
        self.num_generated_tokens = 0

    # ---- what comes in -------------------------------------------------------------

    def add(self, submit: Submit) -> list[Event]:
        """Take a request in. Answers `Accepted`, or `Failed` while draining."""
        if self.is_draining:
            return [_failed(submit.request_id, EngineUnavailable("the server is shutting down"))]
        request = Request(submit, self._with_defaults(submit.sampling), self._decoder)
        self._requests[submit.request_id] = request
        return [Accepted(submit.request_id)]

    def abort(self, request_id: str) -> list[Event]:
        """End a request in whatever state it is. An unknown or finished one is no error."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        request.finish("abort")
        return self._retire([request])

    def prepared(self, request_id: str, outcome: PreparedPrompt | RequestError) -> list[Event]:
        """A preparer is done with a request, which may have been aborted meanwhile."""
        self._with_preparer.discard(request_id)
        request = self._requests.get(request_id)
        if request is None:
            return []
        if isinstance(outcome, RequestError):
            return self._fail(request, outcome)
        try:
            request.take_prompt(outcome, self._room_for_answer(request, outcome))
        except ContextLengthExceeded as error:
            return self._fail(request, error)
        return []

    # ---- what goes out -------------------------------------------------------------

    def start_preparing(self) -> list[Submit]:
        """Requests that a preparer should take now, oldest first; never more than can wait.

        An aborted request keeps its preparer until that is done with it.
        """
        limit = self._config.max_num_seqs + self._config.max_preparing
        places = limit - sum(r.state is not State.WAITING for r in self._requests.values())
        places = min(places, self._config.max_preparing - len(self._with_preparer))
        started: list[Submit] = []
        for request in self._in_state(State.WAITING):
            if len(started) >= places:
                break
            request.move_to(State.PREPARING)
            self._with_preparer.add(request.request_id)
            assert request.submit is not None
            started.append(request.submit)
        return started

    def schedule(self) -> SchedulerOutput:
        """The next step. Empty if there is nothing that the runner could do."""
        decoding = tuple(r.request_id for r in self._in_state(State.DECODE))
        released, self._released = tuple(self._released), []
        request = self._next_to_prefill(len(decoding))
        if request is None:
            return SchedulerOutput(released=released, decode=decoding)
        assert request.prompt is not None
        new: tuple[NewRequest, ...] = ()
        if not request.is_known_to_runner:
            request.is_known_to_runner = True
            new = (NewRequest(request.request_id, request.prompt, request.sampling),)
        work = self._unit_of(request, request.prompt)
        return SchedulerOutput(
            released=released,
            new=new,
            decode=decoding,
            encode=work if isinstance(work, EncodeWork) else None,
            prefill=work if isinstance(work, PrefillWork) else None,
        )

    def update(self, plan: SchedulerOutput, result: StepResult) -> list[Event]:
        """What a step brought: one `Tokens` for all, then terminal events."""
        self._advance(plan, result)
        deltas, finished, events = [], [], list[Event]()
        for request_id, token_id in result.tokens.items():
            request = self._requests.get(request_id)
            if request is None or request_id in result.failures:
                continue
            text = request.take_token(token_id, self._config.eos_token_ids)
            self.num_generated_tokens += 1
            deltas.append(Delta(request_id, text, 1))
            if request.state.is_finished:
                finished.append(request)
        if deltas:
            events.append(Tokens(tuple(deltas)))
        events += self._retire(finished)
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
        return len(self._requests.keys() | self._with_preparer) + len(self._released)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def has_runner_work(self) -> bool:
        """Whether `schedule` has something for the runner."""
        states = (request.state for request in self._requests.values())
        return bool(self._released) or any(s in (State.PREFILL, State.DECODE) for s in states)

    # ---- inside --------------------------------------------------------------------

    def _in_state(self, state: State) -> Iterator[Request]:
        return (request for request in self._requests.values() if request.state is state)

    def _next_to_prefill(self, num_rows: int) -> Request | None:
        if num_rows >= self._config.max_num_seqs:
            return None
        return next(self._in_state(State.PREFILL), None)

    def _unit_of(self, request: Request, prompt: PreparedPrompt) -> EncodeWork | PrefillWork:
        """The next picture to encode, or the next chunk: a prompt is prefilled once whole."""
        if request.num_encoded < len(prompt.images):
            return EncodeWork(request.request_id, request.num_encoded)
        start = request.num_prefilled
        end = min(start + self._config.prefill_chunk_tokens, prompt.num_tokens)
        return PrefillWork(request.request_id, start, end, is_last=end == prompt.num_tokens)

    def _advance(self, plan: SchedulerOutput, result: StepResult) -> None:
        """Note the progress of the request whose unit of work was done."""
        work = plan.encode or plan.prefill
        request = self._requests.get(work.request_id) if work else None
        if request is None or request.request_id in result.failures:
            return
        if plan.encode:
            request.num_encoded += 1
        elif plan.prefill:
            request.num_prefilled = plan.prefill.end
            if plan.prefill.is_last:
                request.move_to(State.DECODE)

    def _with_defaults(self, sampling: SamplingParams) -> SamplingParams:
        temperature, top_p = sampling.temperature, sampling.top_p
        return msgspec.structs.replace(
            sampling,
            temperature=self._config.default_temperature if temperature is None else temperature,
            top_p=self._config.default_top_p if top_p is None else top_p,
        )

    def _room_for_answer(self, request: Request, prompt: PreparedPrompt) -> int:
        room = self._config.context_tokens - prompt.num_tokens
        wanted = request.sampling.max_tokens
        if room < 1 or (wanted or 0) > room:
            answer = f" and an answer of up to {wanted}" if wanted else ""
            raise ContextLengthExceeded(
                f"the prompt has {prompt.num_tokens} tokens{answer}; "
                f"this model's context holds {self._config.context_tokens}",
                "messages",
            )
        return wanted or room

    def _fail(self, request: Request, error: RequestError) -> list[Event]:
        request.move_to(State.FINISHED_FAILED)
        self._forget(request)
        return [_failed(request.request_id, error)]

    def _retire(self, requests: list[Request]) -> list[Event]:
        events: list[Event] = []
        for request in requests:
            self._forget(request)
            assert request.finish_reason is not None
            events.append(Finished(request.request_id, request.finish_reason, request.usage))
        return events

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        if request.is_known_to_runner:
            self._released.append(request.request_id)


def _failed(request_id: str, error: RequestError) -> Failed:
    return Failed(request_id, error.code, error.message, error.param)
