"""How requests end, in whatever state they are: by an abort, a failure or a drain."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.clock import Clock
from tests.unit.cache.fakes import FakeDisk
from tests.unit.engine.driver import SteppedEngine, ends_in
from tests.unit.engine.fakes import (
    EOS,
    FakeFeatures,
    answer_text,
    answer_texts,
    prepared,
    prompt,
    submit,
)
from tests.unit.engine.scheduler.situations import FEATURES, bring_to_state, caches_on, finish_all
from vlm_server.cache.caches import Caches
from vlm_server.engine.request.states import LIVE, State
from vlm_server.errors import InternalError, InvalidRequest, OutOfMemory, RequestError, StepTooLong
from vlm_server.interfaces import SchedulerOutput, SeqId, StepResult
from vlm_server.protocol import Deadlines, Failed, Finished


def caches_with_image() -> Caches:
    """The image of `prompt(images=1)` is encoded."""
    caches = Caches(encoder_bytes=100)
    caches.store_features("0", FakeFeatures("features of 0")).release()
    return caches


@pytest.mark.parametrize("state", LIVE)
def test_abort_ends_request_once_in_every_state(state: State):
    engine = SteppedEngine(caches_on(FakeDisk({"0": FakeFeatures("features of 0")})))
    bring_to_state(engine, state)
    engine.abort("a")
    engine.abort("a")
    (finished,) = [event for event in engine.accept() if isinstance(event, Finished)]
    assert finished.is_aborted
    finish_all(engine)
    assert engine.ended.count("a") == 1
    assert engine.is_clean()


@pytest.mark.parametrize("state", LIVE)
def test_abort_leaves_other_requests_unchanged_in_every_state(state: State):
    disk = FakeDisk({"0": FakeFeatures("features of 0")})
    engine = SteppedEngine(caches_on(disk), prefill_chunk_tokens=3)
    bring_to_state(engine, state)
    engine.add("b", text="another")
    engine.abort("a")
    engine.accept()
    finish_all(engine)
    assert answer_texts(engine.events)["b"] == answer_text(prompt("another"))
    assert engine.ended.count("b") == 1
    assert engine.is_clean()


def test_failed_preparation_ends_its_request():
    engine = SteppedEngine()
    engine.preparers.outcome = None
    engine.add("a")
    engine.step()
    engine.preparers.finish("a", InvalidRequest("no", "messages[0]"))
    assert Failed("a", "invalid_value", "no", "messages[0]") in engine.accept()
    assert engine.is_clean()


def test_prepared_prompt_of_aborted_request_is_released():
    caches = caches_with_image()
    engine = SteppedEngine(caches)
    engine.preparers.outcome = None
    engine.add("a", images=1)
    engine.step()
    engine.abort("a")
    engine.step()
    engine.preparers.finish("a", prepared(prompt(images=1), caches))
    assert caches.features.stats().pinned_bytes == 8
    engine.run()
    assert engine.ended == ["a"]
    assert engine.is_clean()


def test_failed_encode_ends_only_its_request():
    engine = SteppedEngine()
    engine.encoder.is_fast = False
    engine.ready("a", "b", images=1)
    engine.step()
    engine.encoder.finish(InternalError("the image failed"))
    engine.encoder.is_fast = True
    assert ends_in(engine.accept()) == ["a"]
    engine.run()
    assert answer_texts(engine.events) == {"b": answer_text(prompt(images=1))}
    assert engine.is_clean()


@pytest.mark.parametrize("images", [0, 1])
def test_failed_chunk_ends_only_its_request(images: int):
    engine = SteppedEngine()
    engine.runner.failing_prefills.add("b")
    engine.add("a", "b", "c", images=images)
    engine.run()
    failed = [event for event in engine.events if isinstance(event, Failed)]
    assert [event.request_id for event in failed] == ["b"]
    assert answer_texts(engine.events) == {
        name: answer_text(prompt(images=images)) for name in "ac"
    }
    assert engine.is_clean()


def test_failed_decode_ends_its_sequences_but_no_prefill():
    engine = SteppedEngine(prefill_chunk_tokens=4)
    engine.add("a", "b", text="1234")
    engine.step_until(lambda: engine.count(State.DECODE) == 2)
    engine.add("c", text="1234")
    engine.runner.fails_decode = True
    engine.run()
    assert engine.ended == ["a", "b", "c"]
    assert answer_texts(engine.events)["c"] == answer_text(prompt("1234"))
    assert engine.is_clean()


def test_failed_sequence_gets_no_token_of_its_step():
    engine = SteppedEngine()
    engine.ready("a")
    engine.step_until(lambda: engine.count(State.DECODE) == 1)
    result = StepResult({SeqId("a"): [EOS]}, {"a": InternalError("no")})
    plan = engine.scheduler.schedule()
    assert engine.scheduler.update(plan, result) == [Failed("a", "internal_error", "no")]


def test_tokens_of_ended_request_are_dropped():
    engine = SteppedEngine()
    result = StepResult({SeqId("gone"): [1]})
    assert engine.scheduler.update(SchedulerOutput(), result) == []


def test_drain_refuses_new_requests_and_finishes_rest():
    engine = SteppedEngine()
    engine.add("a")
    engine.step()
    engine.drain()
    engine.add("b")
    (refused,) = [event for event in engine.accept() if isinstance(event, Failed)]
    assert refused.code == "engine_unavailable"
    engine.run()
    assert answer_texts(engine.events) == {"a": answer_text(prompt())}
    assert engine.plans[-1].is_drained
    assert engine.is_clean()


def test_finished_sequence_is_dropped_by_single_plan():
    engine = SteppedEngine()
    engine.add("a")
    engine.run()
    assert [plan.finished_seqs for plan in engine.plans if plan.finished_seqs] == [(SeqId("a"),)]


def test_request_unknown_to_runner_is_not_dropped_there():
    engine = SteppedEngine()
    engine.preparers.outcome = None
    engine.add("a")
    engine.step()
    engine.abort("a")
    assert not engine.step().has_runner_work


def test_new_scheduler_does_not_clear_caches():
    """Other requests may use the features."""
    caches = caches_with_image()
    SteppedEngine(caches)
    assert caches.features.stats().entries == 1


# ---- retries -------------------------------------------------------------------------


TEXT = "x" * 40


def fail(error: RequestError, times: int, **settings: int) -> SteppedEngine:
    """One request decodes; the first chunks of another fail."""
    engine = SteppedEngine(prefill_chunk_tokens=16, **settings)
    engine.add("first", text="hello", max_tokens=200)
    engine.step_until(lambda: bool(answer_texts(engine.events).get("first")))
    engine.runner.chunk_errors["a"] = [error] * times
    engine.add("a", text=TEXT)
    engine.run()
    assert answer_texts(engine.events)["first"] == answer_text(prompt("hello"))[:200]
    assert engine.num_tracked == 0
    return engine


def end_of(engine: SteppedEngine, request_id: str) -> Finished | Failed:
    (end,) = (
        each
        for each in engine.events
        if isinstance(each, Finished | Failed) and each.request_id == request_id
    )
    return end


@pytest.mark.parametrize(
    ("error", "times"),
    [(OutOfMemory("none"), 1), (StepTooLong("long"), 3)],
    ids=["out of memory", "step too long"],
)
def test_prompt_is_answered_after_retries(error: RequestError, times: int):
    engine = fail(error, times)
    assert isinstance(end_of(engine, "a"), Finished)
    assert answer_texts(engine.events)["a"] == answer_text(prompt(TEXT))
    assert engine.governor.stats().decisions[f"failure_{error.code}"] == times


@pytest.mark.parametrize(
    ("error", "times"),
    [(OutOfMemory("none"), 2), (StepTooLong("long"), 4), (InternalError("a bug"), 1)],
    ids=["out of memory", "step too long", "internal error"],
)
def test_prompt_fails_after_last_retry(error: RequestError, times: int):
    end = end_of(fail(error, times), "a")
    assert isinstance(end, Failed)
    assert end.code == error.code


def test_every_retry_halves_chunks():
    engine = fail(StepTooLong("long"), 2)
    sizes = [end - start for name, start, end in engine.chunks if name == "a"]
    assert sizes[:2] == [16, 8]
    assert max(sizes[2:]) == 4
    assert sum(sizes[2:]) == len(TEXT)


def test_larger_chunks_are_tried_again_later():
    engine = fail(StepTooLong("long"), 2)
    engine.add("long", text="y" * 100)
    engine.run()
    sizes = [end - start for name, start, end in engine.chunks if name == "long"]
    assert sizes[0] == 4
    assert max(sizes) == 8


# ---- deadlines -----------------------------------------------------------------------


def timed_engine() -> tuple[SteppedEngine, Clock]:
    """An engine whose time a test moves."""
    engine, clock = SteppedEngine(caches_on(FakeDisk(FEATURES))), Clock()
    engine.scheduler._clock = clock
    return engine, clock


def add(engine: SteppedEngine, name: str, deadlines: Deadlines, **sampling: object) -> None:
    submitted = submit(name, **sampling)
    engine.inbox.put(msgspec.structs.replace(submitted, deadlines=deadlines))


def failures(engine: SteppedEngine) -> list[tuple[str, str]]:
    return [(one.request_id, one.code) for one in engine.events if isinstance(one, Failed)]


@pytest.mark.parametrize("state", LIVE)
def test_missed_deadline_ends_request_once_in_every_state(state: State) -> None:
    engine, clock = timed_engine()
    bring_to_state(engine, state)
    request = engine.request("a")
    request.deadlines._total_at = clock.now + 5
    engine.accept()
    assert failures(engine) == []
    clock.now += 5
    engine.accept()
    assert failures(engine) == [("a", "total_timeout")]
    engine.abort("a")
    finish_all(engine)
    assert engine.ended.count("a") == 1
    assert engine.is_clean()


def test_preparation_past_queue_deadline_is_cancelled() -> None:
    engine, clock = timed_engine()
    engine.preparers.outcome = None
    add(engine, "a", Deadlines(queue_timeout_seconds=1))
    (work,) = engine.step().prepare
    clock.now += 1
    engine.step()
    assert work.cancellation.is_cancelled
    assert failures(engine) == [("a", "queue_timeout")]


def test_encoding_request_has_no_queue_deadline() -> None:
    engine, clock = timed_engine()
    engine.encoder.is_fast = False
    submitted = msgspec.structs.replace(
        submit("a", images=1), deadlines=Deadlines(queue_timeout_seconds=1)
    )
    engine.inbox.put(submitted)
    engine.step_until(lambda: engine.encoder.work is not None)
    clock.now += 100
    engine.step()
    engine.encoder.finish()
    engine.run()
    assert answer_texts(engine.events) == {"a": answer_text(prompt(images=1))}


def test_request_waiting_for_batch_has_queue_deadline() -> None:
    engine, clock = timed_engine()
    add(engine, "wide", Deadlines(), n=3, max_tokens=100, ignore_eos=True)
    engine.step_until(lambda: len(engine.runner.seqs) == 3)
    add(engine, "b", Deadlines(queue_timeout_seconds=1))
    engine.step_until(lambda: engine.state_of("b") is State.PREFILL)
    clock.now += 1
    engine.step()
    assert failures(engine) == [("b", "queue_timeout")]


def test_first_and_later_tokens_have_separate_deadlines() -> None:
    engine, clock = timed_engine()
    engine.encoder.is_fast = False
    submitted = submit("slow", images=1)
    engine.inbox.put(
        msgspec.structs.replace(submitted, deadlines=Deadlines(first_token_timeout_seconds=2))
    )
    add(engine, "text", Deadlines(first_token_timeout_seconds=2, token_timeout_seconds=3))
    engine.step_until(lambda: bool(answer_texts(engine.events)))
    clock.now += 2
    engine.events += engine.scheduler.expire()
    assert failures(engine) == [("slow", "first_token_timeout")]
    clock.now += 1
    engine.events += engine.scheduler.expire()
    assert failures(engine)[1:] == [("text", "token_timeout")]


def test_timely_token_renews_token_deadline() -> None:
    engine, clock = timed_engine()
    add(engine, "a", Deadlines(token_timeout_seconds=3), max_tokens=9, ignore_eos=True)
    for _ in range(1000):
        clock.now += 2
        engine.step()
        if engine.ended:
            break
    assert failures(engine) == []
    assert engine.ended == ["a"]


def test_request_finished_by_late_step_is_answered() -> None:
    engine, clock = timed_engine()
    add(engine, "a", Deadlines(total_timeout_seconds=1), max_tokens=1)
    engine.step_until(lambda: engine.count(State.DECODE) == 1)
    plan = engine.scheduler.schedule()
    result = engine.runner.launch(plan).result()
    clock.now += 100
    engine.scheduler.update(plan, result)
    assert engine.scheduler.expire() == []


def test_scheduler_reports_seconds_to_next_deadline() -> None:
    engine, clock = timed_engine()
    assert engine.scheduler.seconds_to_deadline() == float("inf")
    engine.preparers.outcome = None
    add(engine, "a", Deadlines(queue_timeout_seconds=9, total_timeout_seconds=30))
    add(engine, "b", Deadlines(total_timeout_seconds=7))
    engine.step()
    assert engine.scheduler.seconds_to_deadline() == 7
    clock.now += 8
    assert engine.scheduler.seconds_to_deadline() == 0
    engine.step()
    assert engine.scheduler.seconds_to_deadline() == 1
