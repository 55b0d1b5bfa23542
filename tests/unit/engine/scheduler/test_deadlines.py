"""A request that misses a deadline ends as by an abort, with its error, whatever its state."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.clock import Clock
from tests.unit.cache.fakes import FakeDisk
from tests.unit.engine.driver import SteppedEngine
from tests.unit.engine.fakes import answer_text, answer_texts, prompt, submit
from tests.unit.engine.scheduler.situations import FEATURES, bring_to_state, caches_on, finish_all
from vlm_server.engine.request.states import LIVE, State
from vlm_server.protocol import Deadlines, Failed


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
