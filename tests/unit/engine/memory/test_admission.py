"""Admission by memory: reserved bytes never exceed the limit, and every request runs or is refused.

The fake memory holds a byte for each position of each sequence that the runner has: sequences that
decode side by side are as wide as the longest.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.whole_run import examples
from tests.unit.engine import driver
from tests.unit.engine.fakes import (
    ByteDecoder,
    FakeMemory,
    FakeProcess,
    FakeStep,
    answer_text,
    answer_texts,
    prepared,
    prompt,
    submit,
)
from vlm_server.cache.caches import Caches
from vlm_server.engine.memory.admission import Admission
from vlm_server.engine.memory.governor import Governor
from vlm_server.engine.request.request import Request
from vlm_server.engine.request.states import State
from vlm_server.errors import MemoryExceeded, OutOfMemory
from vlm_server.interfaces import SchedulerOutput, StepResult
from vlm_server.protocol import Failed, Finished, SamplingParams, Submit
from vlm_server.settings import MemorySettings

WEIGHTS = 1000


class AdmissionEngine(driver.SteppedEngine):
    """A loop with memory for `room` tokens of all sequences."""

    def __init__(self, room: int) -> None:
        memory = FakeMemory(WEIGHTS, 0, WEIGHTS + room, peak_bytes=0)
        super().__init__(memory=memory, max_preparing=8, context_tokens=1000)
        self.most_held = 0
        launch = self.runner.launch

        def watched(plan: SchedulerOutput) -> FakeStep:
            step = launch(plan)
            held = sum(one.num_prefilled for one in self.runner.prefills.values())
            seqs = self.runner.seqs.values()
            widths = [seq.prompt.num_tokens + len(seq.reported_ids) for seq in seqs]
            held += len(widths) * max(widths, default=0)
            self.memory.active_bytes = WEIGHTS + held
            self.most_held = max(self.most_held, held)
            return step

        self.runner.launch = watched  # type: ignore[method-assign]
        self.governor.reset_stats()
        for work in ("encode", "prefill"):
            self.governor.estimator.begin(work)  # type: ignore[arg-type]
            self.governor.estimator.end(work, 100)  # type: ignore[arg-type]

    def ask(self, *names: str, **sampling: object) -> None:
        self.answer(*(submit(name, **sampling) for name in names))

    def answer(self, *submits: Submit) -> None:
        """Run requests that are all prepared before the first is admitted."""
        self.prepare(*submits)
        self.run()

    def prepare(self, *submits: Submit) -> None:
        usual, self.preparers.outcome = self.preparers.outcome, None
        for each in submits:
            self.inbox.put(each)
        self.step()
        for each in submits:
            self.preparers.finish(each.request_id)
        self.preparers.outcome = usual

    @property
    def answered(self) -> list[str]:
        return [event.request_id for event in self.events if isinstance(event, Finished)]

    @property
    def decisions(self) -> dict[str, int]:
        return self.governor.stats().decisions


# A request of 5 prompt tokens and up to 20 of its answer takes 25 tokens until it ends.


def test_fitting_requests_run_together_and_rest_wait_in_order():
    engine = AdmissionEngine(room=61)
    engine.ask("a", "b", "c", "d", max_tokens=20, ignore_eos=True)
    assert engine.answered == ["a", "b", "c", "d"]
    assert engine.decisions["wait"] >= 1
    assert engine.most_held <= 61
    assert engine.num_tracked == 0


def test_refused_request_does_not_block_later_ones():
    engine = AdmissionEngine(room=61)
    engine.answer(submit("huge", max_tokens=60), submit("b", max_tokens=20))
    (failed,) = [event for event in engine.events if isinstance(event, Failed)]
    assert (failed.request_id, failed.code) == ("huge", "memory_exceeded")
    assert engine.answered == ["b"]
    assert engine.decisions["refuse"] == 1


def test_admission_counts_all_choices_of_request():
    engine = AdmissionEngine(room=61)
    engine.ask("two", n=2, max_tokens=20)
    engine.ask("three", n=3, max_tokens=20)
    assert engine.answered == ["two"]


@pytest.mark.parametrize(("atomic", "largest_chunk"), [(0, 5), (4, 5), (9, 9), (13, 13)])
def test_admission_counts_atomic_chunk_whole(atomic: int, largest_chunk: int):
    governor = Governor(MemorySettings(), FakeMemory(), FakeProcess(), Caches())
    admission = Admission(governor, lambda num_tokens: num_tokens, max_chunk_tokens=5)
    request = Request(submit("a"), SamplingParams(max_tokens=1), ByteDecoder(), clock=lambda: 0.0)
    request.move_to(State.PREPARING)
    prepared_prompt = replace(prompt("of 13 letters"), atomic_prefill_tokens=atomic)
    request.on_prepared(prepared(prepared_prompt), 1)
    decision = admission.make_room_for(request, [], some_are_ending=False)
    assert decision == governor.estimator.bytes_for("prefill", largest_chunk)


MIB = 1 << 20


def test_admission_reserves_branch_of_longest_option_and_counts_others():
    """With a mebibyte for each token of KV, and as much for its logits."""
    memory = FakeMemory(0, 0, 60 * MIB, peak_bytes=0)
    governor = Governor(MemorySettings(), memory, FakeProcess(), Caches())
    admission = Admission(governor, lambda num_tokens: num_tokens * MIB, max_chunk_tokens=5)
    request = Request(submit("a"), SamplingParams(), ByteDecoder(), clock=lambda: 0.0)
    request.logit_bytes = MIB
    request.move_to(State.PREPARING)
    question = replace(prompt("?"), options=((1,), (2, 3), (4, 5, 6)))
    request.on_prepared(prepared(question), 0)
    count = question.num_tokens + 3
    prefill_bytes = governor.estimator.bytes_for("prefill", 3)
    decision = admission.make_room_for(request, [], some_are_ending=False)
    assert decision == count * MIB + 3 * MIB + prefill_bytes
    rows = [admission.fits_branches(request, rows, 3, [], encode_bytes=0) for rows in (1, 2, 100)]
    assert rows == [True, 2 * count + 6 <= 60, False]


def test_admission_counts_padding_to_longest_sequence():
    """25 and 10 tokens would fit into 41 beside each other, were it not for the padding."""
    engine = AdmissionEngine(room=41)
    engine.ask("long", "short", max_tokens=20, ignore_eos=True)
    assert engine.decisions["wait"] == 1
    engine = AdmissionEngine(room=41)
    engine.answer(submit("long", max_tokens=20, ignore_eos=True), submit("short", max_tokens=5))
    assert engine.decisions["wait"] == 1
    assert engine.answered == ["long", "short"]


def test_admission_resumes_after_external_memory_pressure():
    engine = AdmissionEngine(room=61)
    engine.memory.limit_bytes -= 40
    engine.ask("a", "b", max_tokens=10)
    assert set(engine.answered) == {"a", "b"}
    engine.memory.limit_bytes += 40
    waits = engine.decisions.get("wait", 0)
    engine.ask("c", "d", max_tokens=10)
    assert set(engine.answered) == {"a", "b", "c", "d"}
    assert engine.decisions.get("wait", 0) == waits


def test_abort_of_waiting_request_leaves_nothing():
    engine = AdmissionEngine(room=35)
    engine.prepare(submit("a", max_tokens=20, ignore_eos=True), submit("b", max_tokens=20))
    engine.step()
    assert engine.state_of("b") is State.WAITING_FOR_MEMORY
    assert engine.count(State.PREFILL) == 0, "who waits for memory is not counted there"
    assert engine.decisions["wait"] == 1
    engine.abort("b")
    engine.run()
    assert engine.num_tracked == 0


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 30)), min_size=1, max_size=8),
    st.integers(10, 120),
)
def test_every_request_is_answered_or_refused_within_memory(
    requests: list[tuple[int, int]], room: int
):
    engine = AdmissionEngine(room)
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
    assert set(engine.answered) == fits
    assert failed == {f"{number}" for number in range(len(requests))} - fits
    assert engine.most_held <= room
    assert engine.num_tracked == engine.runner.num_tracked == 0


# ---- the loop ----------------------------------------------------------------------------


def test_idle_engine_clears_pool_only_once():
    engine = AdmissionEngine(room=1000)
    engine.ask("a", max_tokens=5)
    engine.memory.pool_bytes = 100 << 20
    engine.governor._settings = MemorySettings(idle_clear_seconds=0.01)
    time.sleep(0.02)
    engine.step()
    assert (engine.memory.pool_bytes, engine.decisions["clear_idle"]) == (0, 1)
    assert engine.governor.seconds_until_clear() is None


def test_out_of_memory_step_evicts_unused_entries():
    engine = AdmissionEngine(room=1000)
    engine.runner.chunk_errors["a"] = [OutOfMemory("none")]
    engine.ask("a", max_tokens=5)
    assert engine.decisions["clear_failure"] == 1
    engine.ask("b", max_tokens=50)
    assert engine.answered == ["a", "b"]


def test_prompts_without_memory_do_not_end_engine():
    engine = AdmissionEngine(room=1000)
    engine.loop.max_failed_steps = 3
    launch = engine.runner.launch

    def failing(plan: SchedulerOutput) -> FakeStep:
        step = launch(plan)
        if plan.prefills and plan.prefills[0].request_id != "other":
            failures = {plan.prefills[0].request_id: OutOfMemory("none")}
            step.brings = StepResult(failures=failures, error="none")
        return step

    engine.runner.launch = failing  # type: ignore[method-assign]
    for number in range(10):
        engine.ask(f"{number}", max_tokens=5)
    engine.ask("other", max_tokens=5)
    assert engine.answered == ["other"]


def test_encode_out_of_memory_is_retried_once():
    engine = AdmissionEngine(room=1000)
    engine.encoder.is_fast = False
    engine.add("a", images=1, max_tokens=50)
    engine.step_until(lambda: engine.encoder.work is not None)
    engine.encoder.finish(OutOfMemory("none"))
    engine.encoder.is_fast = True
    engine.run()
    assert [work.span_index for work in engine.encoder.done] == [0, 0]
    assert answer_texts(engine.events)["a"] == answer_text(prompt(images=1))
    assert engine.decisions["clear_failure"] == 1


def test_requests_overlap_if_both_peaks_fit():
    engine = AdmissionEngine(room=100)
    admission = Admission(engine.governor, engine.runner.kv_bytes, 64)
    a, b, c = (waiting(name) for name in "abc")
    a.transient_bytes, b.transient_bytes = 60, 40
    assert admission.fit_concurrently((a, b), [])
    assert not admission.fit_concurrently((a, b), [c]), "its 25 tokens are reserved"
    a.transient_bytes = 35
    assert admission.fit_concurrently((a, b), [c])
    b.transient_bytes = 41
    assert not admission.fit_concurrently((a, b), [c])


@pytest.mark.parametrize(("room", "advice"), [(25, " `max_tokens` may be at most 20."), (4, "")])
def test_memory_refusal_names_possible_answer_length(room: int, advice: str):
    engine = AdmissionEngine(room=room)
    admission = Admission(engine.governor, engine.runner.kv_bytes, 64)
    with pytest.raises(MemoryExceeded) as refused:
        admission.make_room_for(waiting("a", max_tokens=30), [], some_are_ending=False)
    assert refused.value.message.endswith(f"are available besides the model.{advice}")
    assert refused.value.param == ("max_tokens" if advice else None)
    assert engine.governor.stats().decisions == {"refuse": 1}


def test_answer_cut_to_context_reserves_like_unbounded_one():
    engine = AdmissionEngine(room=5000)
    admission = Admission(engine.governor, engine.runner.kv_bytes, 64)
    cut = waiting("cut", max_tokens=65535)
    cut.max_tokens = 10_000
    assert admission.make_room_for(cut, [], some_are_ending=False) is not None
    with pytest.raises(MemoryExceeded):
        admission.make_room_for(waiting("long", max_tokens=10_000), [], some_are_ending=False)


def waiting(name: str, text: str = "", max_tokens: int = 20) -> Request:
    """A request that is prepared: 5 prompt tokens, if not of `text`."""
    request = Request(
        submit(name), SamplingParams(max_tokens=max_tokens), ByteDecoder(), clock=lambda: 0.0
    )
    request.move_to(State.PREPARING)
    request.on_prepared(prepared(prompt(text) if text else prompt()), max_tokens)
    return request


def admit(request: Request, admission: Admission, *admitted: Request) -> bool:
    """Whether the request is admitted."""
    transient_bytes = admission.make_room_for(request, admitted, some_are_ending=False)
    if transient_bytes is not None:
        request.admit(transient_bytes)
    return transient_bytes is not None


def test_transient_bytes_of_admitted_requests_stay_reserved():
    """The image of the first takes 30 more for a while; the second, a text, must not use them."""
    engine = AdmissionEngine(room=81)
    admission = Admission(engine.governor, engine.runner.kv_bytes, 64)
    image, text = waiting("image"), waiting("text")
    assert admit(image, admission)
    image.transient_bytes = 30
    engine.memory.limit_bytes -= 2
    assert not admit(text, admission, image)
    engine.memory.limit_bytes += 2
    assert admission.make_room_for(text, [image], some_are_ending=False) is not None, (
        "25, 25 and 30"
    )
    engine.memory.limit_bytes -= 2
    image.move_to(State.DECODE)
    assert admit(text, admission, image), "its worst moment is over"


def test_transient_bytes_count_width_of_requests_not_begun():
    engine = AdmissionEngine(room=10_000)
    admission = Admission(engine.governor, engine.runner.kv_bytes, 64)
    long, short = waiting("long", "x" * 400), waiting("short")
    admit(long, admission)
    admit(short, admission, long)
    assert short.transient_bytes == 2 * 400


def test_padding_is_reserved_once():
    engine = AdmissionEngine(room=10_000)
    admission = Admission(engine.governor, engine.runner.kv_bytes, 64)
    long, short = waiting("long", "x" * 400), waiting("short")
    for request in (long, short):
        request.admit(0)
        request.move_to(State.DECODE)
        request.is_known_to_runner, request.num_prefilled = True, request.prompt.num_tokens
    engine.caches = Caches(encoder_bytes=1000)
    engine.governor._caches = engine.caches
    engine.caches.features.put("old", Features(), 1000).release()
    engine.memory.active_bytes = WEIGHTS + 800
    engine.memory.limit_bytes = engine.memory.active_bytes + 2 * 20
    admission.make_room_for_reserved([long, short])
    assert engine.caches.features.stats().entries == 1
    engine.memory.limit_bytes -= 1
    admission.make_room_for_reserved([long, short])
    assert engine.caches.features.stats().entries == 0


class Features:
    size_bytes = 1000
    tokens_per_call: int | None = None
