"""Requests and memory: who is let in, who waits behind whom, and that nobody waits for ever.

The fake memory holds a byte for each place of each row that the runner has: rows that decode side
by side are as wide as the longest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.fakes import (
    ByteDecoder,
    FakeEncoder,
    FakeMemory,
    FakePreparer,
    FakeRunner,
    answer_text,
    config,
    prompt,
    submit,
    texts,
)
from vlm_server.cache.caches import Caches
from vlm_server.engine.loop import EngineLoop
from vlm_server.engine.memory.admission import Admission
from vlm_server.engine.memory.governor import Governor
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.engine.scheduling.scheduler import Scheduler
from vlm_server.errors import OutOfMemory
from vlm_server.ports import PreparedPrompt, SchedulerOutput, StepResult
from vlm_server.protocol import Event, Failed, Finished, SamplingParams, Submit
from vlm_server.settings import Memory

WEIGHTS = 1000


class Engine:
    """A loop around fakes, with room for `room` tokens of rows."""

    def __init__(self, room: int) -> None:
        self.memory = FakeMemory(WEIGHTS, 0, WEIGHTS + room, 10, 0)
        limits = config(max_preparing=8, context_tokens=1000)
        self.runner = FakeRunner(limits.max_num_seqs, limits.prefill_chunk_tokens)
        self.encoder = FakeEncoder()
        self.preparer = FakePreparer()
        self.governor = Governor(Memory(), self.memory, Caches.of())
        self.most_held = 0
        admission = Admission(self.governor, self.runner.kv_bytes, limits.prefill_chunk_tokens)
        self.scheduler = Scheduler(limits, ByteDecoder(), admission=admission)
        self.events: list[Event] = []
        execute = self.runner.execute

        def watched(plan: SchedulerOutput, launched: Callable[[], None]) -> StepResult:
            result = execute(plan, launched)
            held = sum(one.num_prefilled for one in self.runner.prefills.values())
            rows = self.runner.rows.values()
            widths = [row.prompt.num_tokens + len(row.told) for row in rows]
            held += len(widths) * max(widths, default=0)
            self.memory.active_bytes = WEIGHTS + held
            self.most_held = max(self.most_held, held)
            return result

        self.runner.execute = watched  # type: ignore[method-assign]
        self.loop = EngineLoop(
            SimpleQueue(),
            self.scheduler,
            self.runner,
            self.preparer,
            self.encoder,
            self.governor,
            self.events.append,
            preparer_threads=8,
            max_failed_steps=3,
        )
        self.governor.reset_stats()
        for work in ("encode", "prefill"):
            self.governor.estimator.begin(work)  # type: ignore[arg-type]
            self.governor.estimator.end(work, 100)  # type: ignore[arg-type]

    def run(self, *names: str, **sampling: object) -> None:
        self.answer(*(submit(name, **sampling) for name in names))

    def answer(self, *submits: Submit) -> None:
        """All are prepared when the first step is done."""
        self.prepare(*submits)
        self.loop.run_until_idle()

    def prepare(self, *submits: Submit) -> None:
        self.preparer.gate.clear()
        for each in submits:
            self.loop.post(each)
            self.loop.turn()
        self.preparer.gate.set()
        while self.loop._inbox.qsize() < len(submits):
            time.sleep(0.001)

    @property
    def ended(self) -> list[str]:
        return [event.request_id for event in self.events if isinstance(event, Finished)]

    @property
    def decisions(self) -> dict[str, int]:
        return self.governor.read().decisions


# A request of 5 prompt tokens and up to 20 of its answer lasts for 25 tokens.


def test_those_that_fit_run_together_and_the_others_wait_in_order():
    engine = Engine(room=61)
    engine.run("a", "b", "c", "d", max_tokens=20, ignore_eos=True)
    assert engine.ended == ["a", "b", "c", "d"]
    assert engine.decisions["wait"] >= 1
    assert engine.most_held <= 61
    assert engine.scheduler.num_tracked == 0


def test_who_could_never_fit_is_refused_and_those_behind_it_are_not():
    engine = Engine(room=61)
    engine.answer(submit("huge", max_tokens=60), submit("b", max_tokens=20))
    (failed,) = [event for event in engine.events if isinstance(event, Failed)]
    assert (failed.request_id, failed.code) == ("huge", "memory_exceeded")
    assert engine.ended == ["b"]
    assert engine.decisions["refuse"] == 1


def test_all_rows_of_a_request_count():
    engine = Engine(room=61)
    engine.run("two", n=2, max_tokens=20)
    engine.run("three", n=3, max_tokens=20)
    assert engine.ended == ["two"]


@pytest.mark.parametrize(("uncut", "largest_chunk"), [(0, 5), (4, 5), (9, 9), (13, 13)])
def test_a_chunk_that_must_not_be_cut_counts_whole(uncut: int, largest_chunk: int):
    governor = Governor(Memory(), FakeMemory(), Caches.of())
    admission = Admission(governor, lambda num_tokens: num_tokens, max_chunk_tokens=5)
    request = Request(submit("a"), SamplingParams(max_tokens=1), ByteDecoder())
    request.move_to(State.PREPARING)
    request.take_prompt(replace(prompt("of 13 letters"), atomic_prefill_tokens=uncut), 1)
    assert admission.admit(request, [], is_settled=True)
    assert request.transient_bytes == governor.estimator.of("prefill", largest_chunk)


def test_short_rows_beside_a_long_one_are_as_wide_as_it():
    """25 and 10 tokens would fit into 41 beside each other, were it not for the padding."""
    engine = Engine(room=41)
    engine.run("long", "short", max_tokens=20, ignore_eos=True)
    assert engine.decisions["wait"] == 1
    engine = Engine(room=41)
    engine.answer(submit("long", max_tokens=20, ignore_eos=True), submit("short", max_tokens=5))
    assert engine.decisions["wait"] == 1
    assert engine.ended == ["long", "short"]


def test_pressure_from_elsewhere_ends_with_it():
    engine = Engine(room=61)
    engine.memory.limit_bytes -= 40
    engine.run("a", "b", max_tokens=10)
    assert set(engine.ended) == {"a", "b"}
    engine.memory.limit_bytes += 40
    waits = engine.decisions.get("wait", 0)
    engine.run("c", "d", max_tokens=10)
    assert set(engine.ended) == {"a", "b", "c", "d"}
    assert engine.decisions.get("wait", 0) == waits


def test_an_abort_of_who_waits_leaves_nothing():
    engine = Engine(room=35)
    engine.prepare(submit("a", max_tokens=20, ignore_eos=True), submit("b", max_tokens=20))
    engine.loop.turn()
    assert engine.decisions["wait"] == 1
    engine.scheduler.abort("b")
    engine.loop.run_until_idle()
    assert engine.scheduler.num_tracked == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 30)), min_size=1, max_size=8),
    st.integers(10, 120),
)
def test_everybody_is_answered_or_refused_and_the_room_is_never_exceeded(
    requests: list[tuple[int, int]], room: int
):
    engine = Engine(room)
    engine.answer(
        *(
            submit(f"{number}", n=n, max_tokens=max_tokens, ignore_eos=True)
            for number, (n, max_tokens) in enumerate(requests)
        )
    )
    failed = {event.request_id for event in engine.events if isinstance(event, Failed)}
    fits = {
        f"{number}"
        for number, (n, max_tokens) in enumerate(requests)
        if n * (5 + max_tokens) <= room
    }
    assert set(engine.ended) == fits
    assert failed == {f"{number}" for number in range(len(requests))} - fits
    assert engine.most_held <= room
    assert engine.scheduler.num_tracked == engine.runner.num_tracked == 0


# ---- the loop ----------------------------------------------------------------------------


def test_an_idle_engine_clears_once_and_then_waits_for_requests():
    engine = Engine(room=1000)
    engine.run("a", max_tokens=5)
    engine.memory.pool_bytes = 100 << 20
    engine.loop._governor._settings = Memory(idle_clear_seconds=0.01)
    engine.loop.turn()
    assert (engine.memory.pool_bytes, engine.decisions["clear_idle"]) == (0, 1)
    assert engine.governor.idle_seconds_left() is None


def test_a_step_that_ran_out_of_memory_frees_what_nobody_uses():
    engine = Engine(room=1000)
    execute = engine.runner.execute

    def once(plan: SchedulerOutput, launched: Callable[[], None]) -> StepResult:
        engine.runner.execute = execute  # type: ignore[method-assign]
        result = execute(plan, launched)
        return StepResult(failures={"a": OutOfMemory("none")}, error=result.error)

    engine.runner.execute = once  # type: ignore[method-assign]
    engine.run("a", max_tokens=5)
    assert engine.decisions["clear_failure"] == 1
    engine.run("b", max_tokens=50)
    assert engine.ended == ["b"]


def test_a_prompt_that_finds_no_memory_does_not_end_the_engine():
    engine = Engine(room=1000)
    execute = engine.runner.execute

    def failing(plan: SchedulerOutput, launched: Callable[[], None]) -> StepResult:
        result = execute(plan, launched)
        if plan.prefill is None or plan.prefill.request_id == "other":
            return result
        failure = OutOfMemory("none")
        return StepResult(failures={plan.prefill.request_id: failure}, error=failure)

    engine.runner.execute = failing  # type: ignore[method-assign]
    for number in range(10):
        engine.run(f"{number}", max_tokens=5)
    engine.run("other", max_tokens=5)
    assert engine.ended == ["other"]


def test_an_encode_that_ran_out_of_memory_is_tried_once_more():
    engine = Engine(room=1000)
    encode, calls = engine.encoder.encode, list[int]()

    def failing(prepared: PreparedPrompt, image_index: int) -> object:
        calls.append(image_index)
        if len(calls) == 1:
            raise OutOfMemory("none")
        return encode(prepared, image_index)

    engine.encoder.encode = failing  # type: ignore[method-assign, assignment]
    engine.loop.post(submit("a", images=1, max_tokens=50))
    engine.loop.run_until_idle()
    assert calls == [0, 0]
    assert texts(engine.events)["a"] == answer_text(prompt(images=1))
    assert engine.decisions["clear_failure"] == 1


def test_two_fit_together_if_there_is_room_for_both_of_their_worst_moments():
    engine = Engine(room=100)
    admission = Admission(engine.governor, engine.runner.kv_bytes, 64)
    a, b, c = (waiting(name) for name in "abc")
    a.transient_bytes, b.transient_bytes = 60, 40
    assert admission.fit_together((a, b), [])
    assert not admission.fit_together((a, b), [c]), "its 25 tokens are reserved"
    a.transient_bytes = 35
    assert admission.fit_together((a, b), [c])
    b.transient_bytes = 41
    assert not admission.fit_together((a, b), [c])


def waiting(name: str, text: str = "", max_tokens: int = 20) -> Request:
    """A request that is prepared: 5 prompt tokens, if not of `text`."""
    request = Request(submit(name), SamplingParams(max_tokens=max_tokens), ByteDecoder())
    request.move_to(State.PREPARING)
    request.take_prompt(prompt(text) if text else prompt(), max_tokens)
    return request


def test_the_worst_moment_of_who_was_let_in_before_stays_reserved():
    """The picture of the first needs 30 in transient; the second, a text, must not take of them."""
    engine = Engine(room=81)
    admission = Admission(engine.governor, engine.runner.kv_bytes, 64)
    picture, text = waiting("picture"), waiting("text")
    assert admission.admit(picture, [], is_settled=True)
    picture.transient_bytes = 30
    assert admission.admit(text, [picture], is_settled=True), "25, 25 and 30"
    engine.memory.limit_bytes -= 2
    assert not admission.admit(text, [picture], is_settled=True)
    picture.move_to(State.DECODE)
    assert admission.admit(text, [picture], is_settled=True), "its worst moment is over"


def test_joining_counts_the_width_of_those_that_have_not_begun():
    engine = Engine(room=10_000)
    admission = Admission(engine.governor, engine.runner.kv_bytes, 64)
    long, short = waiting("long", "x" * 400), waiting("short")
    admission.admit(long, [], is_settled=True)
    admission.admit(short, [long], is_settled=True)
    assert short.transient_bytes == 2 * 400


def test_the_padding_of_rows_is_promised_once():
    engine = Engine(room=10_000)
    admission = Admission(engine.governor, engine.runner.kv_bytes, 64)
    long, short = waiting("long", "x" * 400), waiting("short")
    for request in (long, short):
        request.move_to(State.DECODE)
        request.is_known_to_runner, request.num_prefilled = True, request.prompt.num_tokens  # type: ignore[union-attr]
    engine.memory.active_bytes = WEIGHTS + 800
    engine.memory.limit_bytes = engine.memory.active_bytes + 40
    kept, engine.governor.make_room_for_reserved = [], lambda num_bytes: kept.append(num_bytes)  # type: ignore[method-assign]
    admission.make_room_for_reserved([long, short])
    assert kept == [2 * 20]
