"""How requests end, in whatever state they are: by an abort, a failure or a drain."""

from __future__ import annotations

import pytest

from tests.unit.cache.fakes import FakeDisk
from tests.unit.engine.driver import Engine, ends_in
from tests.unit.engine.fakes import EOS, FakeFeatures, answer_text, prepared, prompt, texts
from tests.unit.engine.scheduler.situations import bring, caches_on, let_everybody_end
from vlm_server.cache.caches import Caches
from vlm_server.engine.request.states import LIVE, State
from vlm_server.errors import InternalError, InvalidRequest
from vlm_server.interfaces import SchedulerOutput, SeqId, StepResult
from vlm_server.protocol import Failed, Finished


def caches_with_a_picture() -> Caches:
    """The picture of `prompt(images=1)` is encoded."""
    caches = Caches(encoder_bytes=100)
    caches.store_features("0", FakeFeatures("features of 0")).release()
    return caches


@pytest.mark.parametrize("state", LIVE)
def test_an_abort_in_every_state_ends_it_once_and_leaves_nothing(state: State):
    engine = Engine(caches_on(FakeDisk({"0": FakeFeatures("features of 0")})))
    bring(engine, state)
    engine.abort("a")
    engine.abort("a")
    (finished,) = [event for event in engine.take_in() if isinstance(event, Finished)]
    assert finished.is_aborted
    let_everybody_end(engine)
    assert engine.ended.count("a") == 1
    assert engine.is_clean()


@pytest.mark.parametrize("state", LIVE)
def test_an_abort_in_every_state_leaves_the_others_as_they_were(state: State):
    disk = FakeDisk({"0": FakeFeatures("features of 0")})
    engine = Engine(caches_on(disk), prefill_chunk_tokens=3)
    bring(engine, state)
    engine.add("b", text="another")
    engine.abort("a")
    engine.take_in()
    let_everybody_end(engine)
    assert texts(engine.events)["b"] == answer_text(prompt("another"))
    assert engine.ended.count("b") == 1
    assert engine.is_clean()


def test_a_preparation_that_failed_ends_that_request():
    engine = Engine()
    engine.preparers.outcome = None
    engine.add("a")
    engine.step()
    engine.preparers.finish("a", InvalidRequest("no", "messages[0]"))
    assert Failed("a", "invalid_value", "no", "messages[0]") in engine.take_in()
    assert engine.is_clean()


def test_an_outcome_that_nobody_waits_for_is_released():
    caches = caches_with_a_picture()
    engine = Engine(caches)
    engine.preparers.outcome = None
    engine.add("a", images=1)
    engine.step()
    engine.abort("a")
    engine.step()
    engine.preparers.finish("a", prepared(prompt(images=1), caches))
    assert caches.features.read().pinned_bytes == 8
    engine.run()
    assert engine.ended == ["a"]
    assert engine.is_clean()


def test_a_picture_that_fails_ends_that_request_alone():
    engine = Engine()
    engine.encoder.is_fast = False
    engine.ready("a", "b", images=1)
    engine.step()
    engine.encoder.finish(InternalError("the picture failed"))
    engine.encoder.is_fast = True
    assert ends_in(engine.take_in()) == ["a"]
    engine.run()
    assert texts(engine.events) == {"b": answer_text(prompt(images=1))}
    assert engine.is_clean()


@pytest.mark.parametrize("images", [0, 1])
def test_a_chunk_that_fails_ends_that_request_alone(images: int):
    engine = Engine()
    engine.runner.failing_prefills.add("b")
    engine.add("a", "b", "c", images=images)
    engine.run()
    failed = [event for event in engine.events if isinstance(event, Failed)]
    assert [event.request_id for event in failed] == ["b"]
    assert texts(engine.events) == {name: answer_text(prompt(images=images)) for name in "ac"}
    assert engine.is_clean()


def test_a_decode_that_fails_ends_its_sequences_and_not_the_prefill_beside():
    engine = Engine(prefill_chunk_tokens=4)
    engine.add("a", "b", text="1234")
    engine.step_until(lambda: engine.count(State.DECODE) == 2)
    engine.add("c", text="1234")
    engine.runner.fails_decode = True
    engine.run()
    assert engine.ended == ["a", "b", "c"]
    assert texts(engine.events)["c"] == answer_text(prompt("1234"))
    assert engine.is_clean()


def test_a_sequence_that_fails_gets_no_token_of_the_same_step():
    engine = Engine()
    engine.ready("a")
    engine.step_until(lambda: engine.count(State.DECODE) == 1)
    result = StepResult({SeqId("a"): [EOS]}, {"a": InternalError("no")})
    plan = engine.scheduler.schedule()
    assert engine.scheduler.update(plan, result) == [Failed("a", "internal_error", "no")]


def test_tokens_of_a_request_that_is_gone_are_dropped():
    engine = Engine()
    result = StepResult({SeqId("gone"): [1]})
    assert engine.scheduler.update(SchedulerOutput(), result) == []


def test_draining_refuses_newcomers_and_finishes_the_others():
    engine = Engine()
    engine.add("a")
    engine.step()
    engine.drain()
    engine.add("b")
    (refused,) = [event for event in engine.take_in() if isinstance(event, Failed)]
    assert refused.code == "engine_unavailable"
    engine.run()
    assert texts(engine.events) == {"a": answer_text(prompt())}
    assert engine.plans[-1].is_drained
    assert engine.is_clean()


def test_a_released_sequence_is_named_once():
    engine = Engine()
    engine.add("a")
    engine.run()
    assert [plan.finished_seqs for plan in engine.plans if plan.finished_seqs] == [(SeqId("a"),)]


def test_a_request_that_the_runner_never_met_is_not_released():
    engine = Engine()
    engine.preparers.outcome = None
    engine.add("a")
    engine.step()
    engine.abort("a")
    assert not engine.step().has_runner_work


def test_a_new_scheduler_leaves_the_caches_as_they_are():
    """They may be in use: it does not own them."""
    caches = caches_with_a_picture()
    Engine(caches)
    assert caches.features.read().entries == 1
