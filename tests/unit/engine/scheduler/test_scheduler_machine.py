"""Random lives: arrivals, aborts and failures in any order, in the real loop.

The invariants: exactly one terminal event for each accepted request, nothing remembered of what has
ended, no sequence lost between scheduler and runner, nobody waits for ever, and what a request says
is what it would have said alone. Requests share images and beginnings, in caches of any size, and
tokens may attend to later ones: nothing stays pinned that nobody waits for, and no image is
encoded that is cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count

import hypothesis.strategies as st
import msgspec
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.support.integrity import check_integrity
from tests.unit.engine.driver import SteppedEngine
from tests.unit.engine.fakes import answer_text, answer_tokens, features_of
from tests.unit.engine.mixed_prompts import (
    Attention,
    Parts,
    num_tokens_of,
    prepare_mixed,
    prompt_mixed,
    submit_mixed,
)
from vlm_server.cache.caches import Caches, EncodedImage
from vlm_server.deadlines import RequestDeadlines
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduler.scheduler import Scheduler
from vlm_server.errors import InternalError, RequestError
from vlm_server.interfaces import Prepared, PreparedPrompt, SchedulerOutput, SeqId
from vlm_server.protocol import (
    Abort,
    Accepted,
    Deadlines,
    Event,
    Failed,
    Finished,
    FinishReason,
    Submit,
    Tokens,
)

MAX_NUM_SEQS, CHUNK, MAX_PREPARING = 3, 4, 2
ROUNDS_PER_REQUEST = 150
"""More than its images, chunks and answer take, and as many of requests served in between."""
TEXTS = st.text("ab é😀", min_size=1, max_size=14)
IMAGES = st.integers(0, 2)
PARTS = st.tuples(st.lists(IMAGES | TEXTS, max_size=3).map(tuple), TEXTS).map(
    lambda drawn: (*drawn[0], drawn[1])
)
LONGEST = 60
"""Tokens of a prompt that is gone on from."""
ENOUGH = 10**6


class WatchedScheduler(Scheduler):
    """A prompt that could be prefilled is, if and only if there is room for its sequences."""

    def schedule(self) -> SchedulerOutput:
        plan = super().schedule()
        is_encoding = self._planner._device_order.is_encoding and not plan.encode_during_step
        prompts = [r for r in self._requests.values() if r.state is State.PREFILL]
        ready = [r for r in prompts if not (r.has_uncached_media and is_encoding)]
        if ready:
            begun = {r.request_id for r in prompts if r.is_known_to_runner}
            reserved = begun | {chunk.request_id for chunk in plan.prefills or ready[:1]}
            num_seqs = len(plan.decode)
            num_seqs += sum(r.sampling.n for r in prompts if r.request_id in reserved)
            assert bool(plan.prefills) == (num_seqs <= MAX_NUM_SEQS)
        return plan


class SchedulerMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, Prepared | RequestError] = {}
        """What preparers made and have not handed in."""
        self.encoded: Counter[str] = Counter()
        self.num_taken = 0
        """Of the engine's events."""
        self.submitted: dict[str, Submit] = {}
        self.parts: dict[str, Parts] = {}
        self.accepted: Counter[str] = Counter()
        self.ended: dict[str, Finished | Failed] = {}
        self.said: dict[SeqId, str] = {}
        self.reasons: dict[SeqId, FinishReason] = {}

    @initialize(
        encoder_bytes=st.sampled_from([0, 8, 16, ENOUGH]),
        prefix_bytes=st.sampled_from([0, 12, 40, ENOUGH]),
        needs_snapshots=st.booleans(),
        attention=st.sampled_from(["before", "before", "in media", "all"]),
        seconds_of_one=st.sampled_from([0.001, 0.01, 0.1]),
        mixed_step_tokens=st.sampled_from([0, 0, MAX_NUM_SEQS + 1, CHUNK]),
        encodes_in_turns=st.booleans(),
    )
    def start(
        self,
        encoder_bytes: int,
        prefix_bytes: int,
        needs_snapshots: bool,
        attention: Attention,
        seconds_of_one: float,
        mixed_step_tokens: int,
        encodes_in_turns: bool,
    ) -> None:
        self.attention = attention
        self.caches = Caches(
            encoder_bytes=encoder_bytes, prefix_bytes=prefix_bytes, needs_snapshots=needs_snapshots
        )
        self.stores_all_images = encoder_bytes == ENOUGH
        ticks = count()
        self.engine = SteppedEngine(
            self.caches,
            scheduler=WatchedScheduler,
            max_num_seqs=MAX_NUM_SEQS,
            clock=lambda: next(ticks) / 1000,  # a life repeats exactly
            prefill_chunk_tokens=CHUNK,
            encodes_in_turns=encodes_in_turns,
            max_preparing=MAX_PREPARING,
            max_images_per_encode=4,
            max_prompts_per_prefill=1 if needs_snapshots else 4,
        )
        self.engine.runner.prefill_seconds = lambda plan: seconds_of_one
        self.engine.runner.mixed_step_tokens = mixed_step_tokens
        # As one, with little more for each, or as long as in turn.
        self.engine.encoder.seconds = lambda count: 0.01 + seconds_of_one * count
        self.runner = self.engine.runner
        self.engine.preparers.outcome = None
        self.engine.encoder.is_fast = False

    # ---- what may happen -------------------------------------------------------------

    @rule(
        target=requests,
        parts=PARTS,
        max_tokens=st.none() | st.integers(1, 6),
        n=st.integers(1, MAX_NUM_SEQS),
        kind=st.sampled_from([(), (), (), ("refuse",), ("crash",)]),
        salt=st.sampled_from(["", "", "other"]),
        client=st.sampled_from(["", "", "other"]),
    )
    def arrive(
        self,
        parts: Parts,
        max_tokens: int | None,
        n: int,
        kind: Parts,
        salt: str,
        client: str = "",
    ) -> str:
        name = f"r{len(self.submitted)}"
        parts = (*kind, *parts)
        submitted = submit_mixed(name, parts, salt, max_tokens=max_tokens, n=n)
        self.submitted[name] = msgspec.structs.replace(submitted, client=client)
        self.parts[name] = parts
        self.engine.inbox.put(self.submitted[name])
        return name

    @rule(target=requests, before=requests, parts=PARTS)
    def continue_conversation(self, before: str, parts: Parts) -> str:
        """The client's next question: the same, the answer as far as it came, and more."""
        earlier = (*self.parts[before], self.said.get(SeqId(before), ""))
        salt = self.submitted[before].cache_salt
        whole = parts if num_tokens_of(earlier) > LONGEST else (*earlier, *parts)
        return self.arrive(whole, None, 1, (), salt)

    @precondition(lambda self: self.tracked)
    @rule(data=st.data())
    def miss_a_deadline(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tracked)))
        self.tracked[name].deadlines = RequestDeadlines(Deadlines(total_timeout_seconds=0.0), 0.0)

    @rule(name=requests)
    def abort(self, name: str) -> None:
        self.engine.inbox.put(Abort(name))

    @precondition(lambda self: self.preparing)
    @rule(data=st.data())
    def prepare(self, data: st.DataObject) -> None:
        self.prepare_one(data.draw(st.sampled_from(sorted(self.preparing))))

    @precondition(lambda self: self.outcomes)
    @rule(data=st.data())
    def finish_preparing(self, data: st.DataObject) -> None:
        self.hand_in_preparation(data.draw(st.sampled_from(sorted(self.outcomes))))

    @precondition(lambda self: self.engine.encoder.works)
    @rule(data=st.data())
    def finish_encoding(self, data: st.DataObject) -> None:
        works = self.engine.encoder.works
        some = st.sampled_from([False, False, False, True])
        self.end_encode([data.draw(some) for _ in works])

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.beat()

    @precondition(lambda self: self.runner.prefills)
    @rule(data=st.data())
    def fail_a_later_chunk(self, data: st.DataObject) -> None:
        self.runner.failing_prefills.add(data.draw(st.sampled_from(sorted(self.runner.prefills))))

    @precondition(lambda self: self.runner.seqs)
    @rule()
    def fail_the_next_decode(self) -> None:
        self.beat()  # what came before may end them all
        self.runner.fails_decode = True
        self.beat()
        self.runner.fails_decode = False

    @precondition(lambda self: self.submitted.keys() - self.ended.keys())
    @rule(parts=PARTS, n=st.integers(1, MAX_NUM_SEQS), client=st.sampled_from(["", "third"]))
    def waits_are_bounded(self, parts: Parts, n: int, client: str) -> None:
        """One more comes in every round, and yet the youngest of now ends within a bound."""
        live = [name for name in self.submitted if name not in self.ended]
        newcomers: list[str] = []
        for _ in range(ROUNDS_PER_REQUEST * len(live)):
            newcomers.append(self.arrive(parts, None, n, (), "", client))
            self.round()
            if live[-1] in self.ended:
                break
        assert live[-1] in self.ended, "it waits for ever"
        for name in newcomers:
            if name not in self.ended:
                self.abort(name)

    @rule()
    def end_all_requests(self) -> None:
        """Let everything end, and look at what is left."""
        for _ in range(2000):
            if self.ended.keys() == self.submitted.keys() and self.engine.is_clean():
                break
            self.round()
        assert self.ended.keys() == self.submitted.keys()
        assert self.engine.is_clean()

    # ---- how it is carried out -------------------------------------------------------

    def end_encode(self, fails: Sequence[bool] = ()) -> None:
        """Of what the encoder has, those that fail do so alone."""
        works, outcomes = self.engine.encoder.works, list[EncodedImage | RequestError]()
        for work, fail in zip(works, fails or [False] * len(works), strict=True):
            self.encoded[work.span.mm_hash] += not fail
            outcomes.append(InternalError("not encoded") if fail else features_of(work.span))
        self.engine.encoder.finish(*outcomes)

    def round(self) -> None:
        """What may be prepared is, an encode ends, and two steps are done."""
        self.beat()
        if self.engine.encoder.works:
            self.end_encode()
        for name in list(self.preparing):
            self.prepare_one(name)
        for name in list(self.outcomes):
            self.hand_in_preparation(name)
        self.beat()

    @property
    def preparing(self) -> dict[str, Submit]:
        """The requests of unfinished preparations."""
        works = self.engine.preparers.works
        return {name: work.submit for name, work in works.items() if name not in self.outcomes}

    def prepare_one(self, name: str) -> None:
        try:
            self.outcomes[name] = prepare_mixed(self.preparing[name], self.caches, self.attention)
        except RequestError as error:
            self.outcomes[name] = error
        except RuntimeError:
            self.outcomes[name] = InternalError("the request could not be prepared")

    def hand_in_preparation(self, name: str) -> None:
        self.engine.preparers.finish(name, self.outcomes.pop(name))

    def beat(self) -> None:
        plan = self.engine.step()
        assert not (plan.encode and plan.encode_during_step)
        works = plan.encode or plan.encode_during_step
        assert len({work.span.mm_hash for work in works}) == len(works), "one image twice"
        assert not [work for work in works if work.span.mm_hash in self.caches.features], (
            "it is there"
        )
        submits = [work.submit for work in self.engine.preparers.works.values()]
        with_media = [submit for submit in submits if submit.has_media]
        assert len(with_media) <= MAX_PREPARING
        assert len(submits) - len(with_media) <= MAX_PREPARING
        events, self.num_taken = self.engine.events[self.num_taken :], len(self.engine.events)
        self.take(events)

    def take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Accepted(name):
                    self.accepted[name] += 1
                case Tokens(deltas):
                    for delta in deltas:
                        assert delta.request_id not in self.ended, "text after the end"
                        seq = SeqId(delta.request_id, delta.choice)
                        assert seq not in self.reasons, "text after the choice's end"
                        self.said[seq] = self.said.get(seq, "") + delta.text
                        if delta.finish_reason:
                            self.reasons[seq] = delta.finish_reason
                case Finished() | Failed():
                    assert event.request_id not in self.ended, "two ends"
                    self.ended[event.request_id] = event
                    self.check_answer(event)

    def check_answer(self, event: Finished | Failed) -> None:
        submitted = self.submitted[event.request_id]
        seqs = [SeqId(event.request_id, choice) for choice in range(submitted.sampling.n)]
        try:
            prepared_prompt = prompt_mixed(submitted)
        except (RequestError, RuntimeError):
            assert not [seq for seq in seqs if seq in self.said]
            return
        is_whole = isinstance(event, Finished) and not event.is_aborted
        limit = submitted.sampling.max_tokens or 1000
        for seq in seqs:
            self.check_choice(seq, prepared_prompt, limit, is_whole or seq in self.reasons)
        if isinstance(event, Finished) and is_whole:
            lengths = [len(answer_tokens(prepared_prompt, seq.choice)[:limit]) for seq in seqs]
            assert event.usage.completion_tokens == sum(lengths)
            assert event.usage.prompt_tokens == prepared_prompt.num_tokens
            cached = self.runner.num_cached_tokens[event.request_id]
            assert event.usage.cached_tokens == cached

    def check_choice(
        self, seq: SeqId, prepared_prompt: PreparedPrompt, limit: int, is_whole: bool
    ) -> None:
        emitted, whole = self.said.get(seq, ""), answer_text(prepared_prompt, limit, seq.choice)
        if not is_whole:
            assert whole.startswith(emitted)
            return
        assert emitted == whole
        is_stop = len(answer_tokens(prepared_prompt, seq.choice)) <= limit
        assert self.reasons[seq] == ("stop" if is_stop else "length")

    # ---- what always holds -----------------------------------------------------------

    @property
    def tracked(self) -> dict[str, Request]:
        return self.engine.scheduler._requests

    @invariant()
    def requests_are_accepted_once(self) -> None:
        assert set(self.accepted.values()) <= {1}
        assert self.ended.keys() | self.tracked.keys() == self.accepted.keys()

    @invariant()
    def sequences_and_prefills_agree(self) -> None:
        held = {seq.request_id for seq in self.runner.seqs}
        if not self.engine.scheduler._planner._finished_seqs:
            live = self.tracked.keys()
            assert held | self.runner.prefills.keys() <= live, "the runner holds what has ended"
        assert self.engine.count(State.DECODE) == len(held & self.tracked.keys())
        for request in self.tracked.values():
            if request.state is State.DECODE:
                assert set(request.seqs) <= self.runner.seqs.keys()

    @invariant()
    def live_requests_are_tracked_once(self) -> None:
        released = len(self.engine.scheduler._planner._finished_seqs)
        elsewhere = self.engine.scheduler._planner._preparer_order.request_ids
        elsewhere |= self.engine.scheduler._planner._device_order.under_way
        assert self.engine.num_tracked == len(self.tracked.keys() | elsewhere) + released

    @invariant()
    def cache_counts_are_consistent(self) -> None:
        check_integrity(self.caches)

    @invariant()
    def only_waiting_requests_pin_cache_entries(self) -> None:
        holders = (State.WAITING_FOR_MEMORY, State.ENCODING, State.PREFILL)
        waiting = [r for r in self.tracked.values() if r.state in holders]
        is_handed_in = not self.engine.inbox.empty()
        if self.outcomes or is_handed_in or any(not r.is_known_to_runner for r in waiting):
            return
        assert not any(reading.pinned_bytes for reading in self.caches.stats())

    @invariant()
    def cached_images_are_not_encoded_again(self) -> None:
        if self.stores_all_images:
            assert all(count <= 1 for count in self.encoded.values())


SchedulerMachine.TestCase.settings = settings(stateful_step_count=40)
TestLives = SchedulerMachine.TestCase
