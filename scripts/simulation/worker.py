"""One daemon: what it does in the order in which it would, for as long as measured costs say.

Whose pictures are encoded and whose chunk is next is decided by the daemon's own `DeviceOrder`, and
the size of a chunk by its own `ChunkSizer`. A step decodes all running sequences and prefills at
most one chunk; the encoder, the preparers and the front work beside it, on the same processor.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import simpy

from scripts.simulation.caches import FeatureStore, PrefixStore
from scripts.simulation.costs import Costs
from scripts.simulation.processor import Processor
from scripts.simulation.request import Picture, Question, SimulatedRequest
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduler.device_order import DeviceOrder
from vlm_server.engine.scheduler.sizing.chunk_sizer import ChunkSizer
from vlm_server.interfaces import EncodeWork

Process = Generator[simpy.Event, Any, Any]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The settings of a daemon that the simulation knows."""

    prefix_bytes: float = 3.1e9
    encoder_bytes: float = 0.78e9
    running_bytes: float = 6e9
    """KV of requests that run; more of them wait."""
    max_num_seqs: int = 175
    preparer_threads: int = 2
    prefill_chunk_tokens: int = 2048
    max_step_seconds: float = 0.1
    encodes_beside_chunks: bool = False
    """Whether the next picture is encoded beside a prompt's last chunk: once that is launched. On a
    CPU it is computed then, since attention there waits for each block of scores."""


class Worker:
    """Takes questions by `ask`, until `lose`."""

    def __init__(
        self,
        env: simpy.Environment,
        name: str,
        costs: Costs,
        limits: Limits,
        processor: Processor,
    ) -> None:
        self._env = env
        self.name = name
        self.processor = processor
        self.is_lost = False
        self._costs = costs
        self._limits = limits
        kv, features = costs.kv_bytes_per_token, costs.feature_bytes_per_token
        self._prefixes = PrefixStore(limits.prefix_bytes / kv, costs.head_tokens)
        self._features = FeatureStore(limits.encoder_bytes / features)
        self._preparers = simpy.Resource(env, limits.preparer_threads)
        self._requests: dict[str, SimulatedRequest] = {}
        self._device_order = DeviceOrder(
            cast("Mapping[str, Request]", self._requests), limits.max_num_seqs
        )
        self._chunk_sizer = ChunkSizer(limits.max_step_seconds, limits.prefill_chunk_tokens)
        self._inbox: list[SimulatedRequest] = []
        self._wake = env.event()
        self._owed = 0.0
        """Seconds of work that the next step does besides."""
        self._num_asked = 0
        env.process(self._run())

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def evicted_tokens(self) -> int:
        """Of prompts and answers."""
        return self._prefixes.evicted_tokens

    def ask(self, question: Question) -> SimulatedRequest:
        """Take a question."""
        self._num_asked += 1
        request = SimulatedRequest(self._env, f"{self.name}/{self._num_asked}", question)
        self._requests[request.request_id] = request
        self._env.process(self._receive(request))
        return request

    def lose(self) -> None:
        """It ends at once, with all that it knows; its requests are told."""
        self.is_lost = True
        for request in self._requests.values():
            for event in (request.first, request.last):
                if not event.triggered:
                    event.succeed(False)
        self._requests.clear()
        self._call()

    # ---- beside the steps ---------------------------------------------------------------

    def _receive(self, request: SimulatedRequest) -> Process:
        """In the front, until the loop knows of it."""
        if self._costs.client_request:
            self.processor.start(self._costs.client_request)
        yield self._work(self._request_seconds(request) / 2)
        self._inbox.append(request)
        self._call()

    def _prepare(self, request: SimulatedRequest) -> Process:
        """Until it can be admitted."""
        costs, question = self._costs, request.question
        with self._preparers.request() as turn:
            yield turn
            request.state = State.PREPARING
            known = self._prefixes.match(question.conversation, question.prompt_tokens)
            new = [one for one in question.pictures if one.end > known]
            new = [one for one in new if one.name not in self._features]
            seconds = sum(costs.picture_seconds(one.tokens) for one in new)
            yield self._work(self._request_seconds(request) / 2 + seconds)
        if not self.is_lost:
            request.state = State.WAITING_FOR_MEMORY
            self._call()

    def _request_seconds(self, request: SimulatedRequest) -> float:
        """One half is taken to be the front's, the other the preparer's."""
        question = request.question
        return self._costs.request_seconds(question.prompt_tokens, len(question.pictures))

    def _encode(self, request: SimulatedRequest, picture: Picture) -> Process:
        yield self._work(self._costs.encode_seconds(picture.tokens))
        self._features.store(picture.name, picture.tokens)
        self._device_order.finish_encode()
        request.take_features(picture)
        self._call()

    def _work(self, seconds: float) -> simpy.Event:
        return self.processor.start(seconds).done

    def _call(self) -> None:
        """Let the loop look, between two steps."""
        if not self._wake.triggered:
            self._wake.succeed()

    # ---- the loop -----------------------------------------------------------------------

    def _run(self) -> Process:
        while not self.is_lost:
            if self._wake.triggered:
                self._wake = self._env.event()
            while self._inbox:
                self._env.process(self._prepare(self._inbox.pop(0)))
            self._admit()
            self._start_encode(None)
            decoding = [r for r in self._requests.values() if r.state is State.DECODE]
            found = self._device_order.next_to_prefill()
            if found is not None:
                yield from self._step(decoding, cast("SimulatedRequest", found))
            elif self._owed or decoding:
                yield from self._decode(decoding)
            else:
                yield self._wake

    def _admit(self) -> None:
        """In order; who has to wait for memory holds up those after it."""
        running = [r for r in self._requests.values() if r.state.is_admitted]
        left = self._limits.running_bytes - sum(map(self._bytes, running))
        for request in list(self._requests.values()):
            if request.state is not State.WAITING_FOR_MEMORY:
                continue
            left -= self._bytes(request)
            if left < 0 and running:
                return
            running.append(request)
            self._match(request)
            request.state = State.ENCODING if request.missing else State.PREFILL

    def _bytes(self, request: SimulatedRequest) -> float:
        tokens = request.question.prompt_tokens + request.question.answer_tokens
        return tokens * self._costs.kv_bytes_per_token

    def _match(self, request: SimulatedRequest) -> None:
        """What is known of it, and what is to be encoded."""
        question = request.question
        cached = self._prefixes.match(question.conversation, question.prompt_tokens)
        request.num_cached_tokens = request.num_prefilled = cached
        new = [one for one in question.pictures if one.end > cached]
        request.missing = [one for one in new if one.name not in self._features]

    def _start_encode(self, beside: SimulatedRequest | None) -> None:
        found = self._device_order.next_to_encode(cast("Request | None", beside))
        if found is not None:
            request = cast("SimulatedRequest", found)
            picture = request.missing[0]
            work = cast("EncodeWork", _Encode(request.request_id))
            self._device_order.start_encode([work], cast("Request | None", beside))
            self._env.process(self._encode(request, picture))

    def _step(self, decoding: Sequence[SimulatedRequest], request: SimulatedRequest) -> Process:
        """Decode once, and prefill a chunk of `request`."""
        self._device_order.start_chunk(cast("Request", request))
        copied = 0 if request.is_known_to_runner else request.num_cached_tokens
        request.is_known_to_runner = True
        left = request.num_prefill_tokens_left
        size = self._chunk_sizer.chunk_tokens(left, others_decode=bool(decoding))
        seconds = self._costs.prefill_seconds(size, request.num_prefilled, copied)
        is_last = size == left
        if is_last and self._limits.encodes_beside_chunks and request.has_uncached_media:
            self._start_encode(request)
        begun, owed = self._env.now, self._take_owed()
        alone = owed + self._decode_seconds(decoding) + seconds
        yield self._work(alone)
        share = seconds / alone if alone else 0.0
        self._chunk_sizer.record(size, (self._env.now - begun) * share)
        if self.is_lost:
            return
        request.num_prefilled += size
        self._advance(decoding, 1)
        if is_last:
            self._begin_answer(request)

    def _decode(self, decoding: Sequence[SimulatedRequest]) -> Process:
        """Steps without a chunk, until an answer ends or something comes."""
        owed, one = self._take_owed(), self._decode_seconds(decoding)
        num_steps = min((request.tokens_left for request in decoding), default=0)
        work = self.processor.start(owed + one * num_steps)
        wake = self._wake
        yield work.done | wake
        if not work.done.triggered and num_steps:
            # What came waits until the step that runs has ended.
            left = self.processor.seconds_left(work)
            num_left = min(num_steps - 1, math.floor(left / one + 1e-9))
            num_steps -= num_left
            self.processor.shorten(work, left - num_left * one)
        if not work.done.triggered:
            yield work.done
        if not self.is_lost:
            self._advance(decoding, num_steps)

    def _decode_seconds(self, decoding: Sequence[SimulatedRequest]) -> float:
        return self._costs.decode_seconds(len(decoding), _longest(decoding))

    def _owe_merge(self) -> None:
        """The batch has changed: its rows are copied."""
        rows = [r for r in self._requests.values() if r.state is State.DECODE]
        self._owed += self._costs.merge_seconds(len(rows), _longest(rows))

    def _take_owed(self) -> float:
        owed, self._owed = self._owed, 0.0
        return owed

    def _begin_answer(self, request: SimulatedRequest) -> None:
        """The last chunk brings the first token, and what was computed is stored.

        Decoding is one step ahead of what it reports: the next step tells nothing of this one, and
        an answer of n tokens takes n steps more.
        """
        prompt_tokens = request.question.prompt_tokens
        self._prefixes.store(request.question.conversation, prompt_tokens)
        self._owed += self._costs.join_seconds(prompt_tokens)
        request.state = State.DECODE
        self._owe_merge()
        request.first.succeed(True)
        if request.tokens_left == 1:
            self._advance([request], 1)

    def _advance(self, decoding: Sequence[SimulatedRequest], num_steps: int) -> None:
        for request in decoding:
            request.tokens_left -= num_steps
            if request.tokens_left <= 0:
                question = request.question
                tokens = question.prompt_tokens + question.answer_tokens
                self._prefixes.store(question.conversation, tokens)
                self._owed += self._costs.tail
                del self._requests[request.request_id]
                request.state = State.FINISHED_ANSWERED
                self._owe_merge()
                request.last.succeed(True)


def _longest(decoding: Sequence[SimulatedRequest]) -> int:
    return max((request.context_tokens for request in decoding), default=0)


@dataclass(frozen=True, slots=True)
class _Encode:
    """What `DeviceOrder` reads of work that it has given."""

    request_id: str
