"""Random lives: arrivals, aborts and failures in any order, against a runner that checks plans.

The invariants: exactly one terminal event for each accepted request, nothing remembered of
what has ended, no row lost between scheduler and runner, nobody waits for ever, and what a
request says is what it would have said alone. Requests share pictures and beginnings, in caches
of any size, and tokens may see later ones: nothing stays pinned that nobody waits for, and no
picture is encoded that is there.
"""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.unit.engine.fakes import (
    FakeEncoder,
    FakeRunner,
    answer_text,
    answer_tokens,
    scheduler,
)
from tests.unit.engine.mixed_prompts import (
    Parts,
    Seen,
    num_tokens_of,
    prepare_mixed,
    submit_mixed,
)
from vlm_server.cache.caches import Caches
from vlm_server.engine.request.states import State
from vlm_server.errors import InternalError, RequestError
from vlm_server.ports import EncodeWork, PreparedPrompt, SeqId
from vlm_server.protocol import Accepted, Event, Failed, Finished, FinishReason, Submit, Tokens

MAX_NUM_SEQS, CHUNK, MAX_PREPARING = 3, 4, 2
ROUNDS_PER_REQUEST = 150
"""More than its pictures, its chunks and its answer take, with as much for who goes between."""
TEXTS = st.text("ab é😀", min_size=1, max_size=14)
PICTURES = st.integers(0, 2)
PARTS = st.tuples(st.lists(PICTURES | TEXTS, max_size=3).map(tuple), TEXTS).map(
    lambda drawn: (*drawn[0], drawn[1])
)
LONGEST = 60
"""Tokens of a prompt that is gone on from."""
ENOUGH = 10**6


class Lives(RuleBasedStateMachine):
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.preparing: dict[str, Submit] = {}
        self.outcomes: dict[str, PreparedPrompt | RequestError] = {}
        """What preparers made and the scheduler has not heard of."""
        self.encoded: Counter[str] = Counter()
        self.encoding: EncodeWork | None = None
        self.asked: dict[str, Submit] = {}
        self.parts: dict[str, Parts] = {}
        self.accepted: Counter[str] = Counter()
        self.ended: dict[str, Finished | Failed] = {}
        self.said: dict[SeqId, str] = {}
        self.reasons: dict[SeqId, FinishReason] = {}

    @initialize(
        encoder_bytes=st.sampled_from([0, 8, 16, ENOUGH]),
        prefix_bytes=st.sampled_from([0, 12, 40, ENOUGH]),
        needs_snapshots=st.booleans(),
        seen=st.sampled_from(["before", "before", "in media", "all"]),
    )
    def start(
        self, encoder_bytes: int, prefix_bytes: int, needs_snapshots: bool, seen: Seen
    ) -> None:
        self.seen = seen
        self.caches = Caches.of(
            encoder_bytes=encoder_bytes, prefix_bytes=prefix_bytes, needs_snapshots=needs_snapshots
        )
        self.keeps_all_pictures = encoder_bytes == ENOUGH
        self.scheduler = scheduler(
            self.caches,
            max_num_seqs=MAX_NUM_SEQS,
            prefill_chunk_tokens=CHUNK,
            max_preparing=MAX_PREPARING,
        )
        self.runner = FakeRunner(MAX_NUM_SEQS, CHUNK, caches=self.caches)

    # ---- what may happen -------------------------------------------------------------

    @rule(
        target=requests,
        parts=PARTS,
        max_tokens=st.none() | st.integers(1, 6),
        n=st.integers(1, MAX_NUM_SEQS),
        kind=st.sampled_from([(), (), (), ("refuse",), ("crash",)]),
        salt=st.sampled_from(["", "", "other"]),
    )
    def arrive(self, parts: Parts, max_tokens: int | None, n: int, kind: Parts, salt: str) -> str:
        name = f"r{len(self.asked)}"
        parts = (*kind, *parts)
        self.asked[name] = submit_mixed(name, parts, salt, max_tokens=max_tokens, n=n)
        self.parts[name] = parts
        self.take(self.scheduler.add(self.asked[name]))
        return name

    @rule(target=requests, before=requests, parts=PARTS)
    def go_on(self, before: str, parts: Parts) -> str:
        """What a client asks next: the same, the answer as far as it came, and more."""
        told = (*self.parts[before], self.said.get(SeqId(before), ""))
        salt = self.asked[before].cache_salt
        whole = parts if num_tokens_of(told) > LONGEST else (*told, *parts)
        return self.arrive(whole, None, 1, (), salt)

    @rule(name=requests)
    def abort(self, name: str) -> None:
        self.take(self.scheduler.abort(name))
        assert name in self.ended

    @rule()
    def start_preparing(self) -> None:
        for started in self.scheduler.start_preparing():
            self.preparing[started.request_id] = started
        with_media = [submit for submit in self.preparing.values() if submit.has_media]
        assert len(with_media) <= MAX_PREPARING
        assert len(self.preparing) - len(with_media) <= MAX_PREPARING

    @precondition(lambda self: self.preparing)
    @rule(data=st.data())
    def prepare(self, data: st.DataObject) -> None:
        self.prepare_one(data.draw(st.sampled_from(sorted(self.preparing))))

    @precondition(lambda self: self.outcomes)
    @rule(data=st.data())
    def finish_preparing(self, data: st.DataObject) -> None:
        self.hand_in(data.draw(st.sampled_from(sorted(self.outcomes))))

    @rule()
    def start_encoding(self) -> None:
        self.encode(self.scheduler.start_encoding())

    @precondition(lambda self: self.encoding)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def finish_encoding(self, fails: bool) -> None:
        work, self.encoding = self.encoding, None
        assert work
        span = work.prompt.images[work.image_index]
        assert span.inputs, "its pixels are not there"
        features = FakeEncoder().encode(work.prompt, work.image_index)
        outcome = InternalError("not encoded") if fails else features
        self.encoded[span.mm_hash] += not fails
        self.take(self.scheduler.encoded(work.request_id, outcome))

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.beat()

    @precondition(lambda self: self.runner.prefills)
    @rule(data=st.data())
    def fail_a_chunk_soon(self, data: st.DataObject) -> None:
        self.runner.failing_prefills.add(data.draw(st.sampled_from(sorted(self.runner.prefills))))

    @precondition(lambda self: self.runner.rows)
    @rule()
    def fail_the_next_decode(self) -> None:
        self.runner.fails_decode = True
        self.beat()
        self.runner.fails_decode = False

    @precondition(lambda self: self.asked.keys() - self.ended.keys())
    @rule(parts=PARTS, n=st.integers(1, MAX_NUM_SEQS))
    def nobody_waits_for_ever(self, parts: Parts, n: int) -> None:
        """One more comes in every round, and yet the youngest of now ends within a bound."""
        live = [name for name in self.asked if name not in self.ended]
        newcomers: list[str] = []
        for _ in range(ROUNDS_PER_REQUEST * len(live)):
            newcomers.append(self.arrive(parts, None, n, (), ""))
            self.round()
            if live[-1] in self.ended:
                break
        assert live[-1] in self.ended, "it waits for ever"
        for name in newcomers:
            if name not in self.ended:
                self.abort(name)

    @rule()
    def forget_nothing(self) -> None:
        """Let everything end, and look at what is left."""
        for _ in range(2000):
            if not (self.scheduler.num_tracked or self.preparing or self.outcomes):
                break
            self.round()
        assert self.scheduler.num_tracked == 0
        assert self.runner.num_tracked == 0
        assert self.ended.keys() == self.asked.keys()
        assert not any(reading.pinned_bytes for reading in self.caches.read())

    # ---- how it is carried out -------------------------------------------------------

    def round(self) -> None:
        """What may be prepared is, one picture is encoded, and one step is done."""
        self.start_preparing()
        self.start_encoding()
        if self.encoding:
            self.finish_encoding(False)
        for name in list(self.preparing):
            self.prepare_one(name)
        for name in list(self.outcomes):
            self.hand_in(name)
        self.beat()

    def prepare_one(self, name: str) -> None:
        try:
            self.outcomes[name] = prepare_mixed(self.preparing.pop(name), self.caches, self.seen)
        except RequestError as error:
            self.outcomes[name] = error
        except RuntimeError:
            self.outcomes[name] = InternalError("the request could not be prepared")

    def hand_in(self, name: str) -> None:
        self.take(self.scheduler.prepared(name, self.outcomes.pop(name)))

    def beat(self) -> None:
        encoded = [r for r in self.scheduler._requests.values() if r.can_prefill]
        begun = [r.request_id for r in encoded if r.request_id in self.runner.prefills]
        ready = [r.request_id for r in encoded if not (r.has_media_left and self.encoding)]
        plan = self.scheduler.schedule()
        if ready:
            reserved = {*begun, plan.prefill.request_id} if plan.prefill else {*begun, ready[0]}
            num_rows = len(plan.decode) + sum(self.asked[name].sampling.n for name in reserved)
            assert bool(plan.prefill) == (num_rows <= MAX_NUM_SEQS), "room is neither more nor less"
        self.encode(self.scheduler.start_encoding_behind(plan))
        if plan.is_empty:
            return
        self.take(self.scheduler.update(plan, self.runner.execute(plan)))

    def encode(self, work: EncodeWork | None) -> None:
        if work:
            assert self.encoding is None, "one picture at a time"
            key = work.prompt.images[work.image_index].mm_hash
            assert key not in self.caches.features, "it is there"
            self.encoding = work

    def take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Accepted(name):
                    self.accepted[name] += 1
                case Tokens(deltas):
                    for delta in deltas:
                        assert delta.request_id not in self.ended, "text after the end"
                        row = SeqId(delta.request_id, delta.choice)
                        assert row not in self.reasons, "text after the choice's end"
                        self.said[row] = self.said.get(row, "") + delta.text
                        if delta.finish_reason:
                            self.reasons[row] = delta.finish_reason
                case Finished() | Failed():
                    assert event.request_id not in self.ended, "two ends"
                    self.ended[event.request_id] = event
                    self.check_answer(event)

    def check_answer(self, event: Finished | Failed) -> None:
        asked = self.asked[event.request_id]
        rows = [SeqId(event.request_id, choice) for choice in range(asked.sampling.n)]
        try:
            made = prepare_mixed(asked)
        except (RequestError, RuntimeError):
            assert not [row for row in rows if row in self.said]
            return
        is_whole = isinstance(event, Finished) and not event.is_aborted
        limit = asked.sampling.max_tokens or 1000
        for row in rows:
            self.check_choice(row, made, limit, is_whole or row in self.reasons)
        if isinstance(event, Finished) and is_whole:
            lengths = [len(answer_tokens(made, row.choice)[:limit]) for row in rows]
            assert event.usage.completion_tokens == sum(lengths)
            assert event.usage.prompt_tokens == made.num_tokens
            cached = self.runner.num_cached_tokens[event.request_id]
            assert event.usage.cached_tokens == cached

    def check_choice(self, row: SeqId, made: PreparedPrompt, limit: int, is_whole: bool) -> None:
        told, whole = self.said.get(row, ""), answer_text(made, limit, row.choice)
        if not is_whole:
            assert whole.startswith(told)
            return
        assert told == whole
        is_stop = len(answer_tokens(made, row.choice)) <= limit
        assert self.reasons[row] == ("stop" if is_stop else "length")

    # ---- what always holds -----------------------------------------------------------

    @invariant()
    def each_is_accepted_once(self) -> None:
        assert all(self.accepted[name] == 1 for name in self.asked)

    @invariant()
    def rows_and_prefills_agree(self) -> None:
        live = self.asked.keys() - self.ended.keys()
        held = {row.request_id for row in self.runner.rows}
        if not self.scheduler._released:
            assert held | self.runner.prefills.keys() <= live, "the runner holds what has ended"
        assert self.scheduler.count(State.DECODE) == len(held & live)
        for request in self.scheduler._requests.values():
            if request.state is State.DECODE:
                assert set(request.rows) <= self.runner.rows.keys()

    @invariant()
    def nothing_is_tracked_when_idle(self) -> None:
        live = self.asked.keys() - self.ended.keys()
        released = len(self.scheduler._released)
        encoding = {self.encoding.request_id} if self.encoding else set()
        elsewhere = self.preparing.keys() | self.outcomes.keys() | encoding
        assert self.scheduler.num_tracked == len(live | elsewhere) + released

    @invariant()
    def caches_hold_what_they_count(self) -> None:
        self.caches.check_integrity()

    @invariant()
    def only_who_waits_for_the_runner_pins(self) -> None:
        waiting = [r for r in self.scheduler._requests.values() if r.state is State.PREFILL]
        if self.outcomes or any(not r.is_known_to_runner for r in waiting):
            return
        assert not any(reading.pinned_bytes for reading in self.caches.read())

    @invariant()
    def no_picture_is_encoded_twice(self) -> None:
        if self.keeps_all_pictures:
            assert all(count <= 1 for count in self.encoded.values())


Lives.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestLives = Lives.TestCase
