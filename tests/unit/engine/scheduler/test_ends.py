"""How requests end, in whatever state they are: by an abort, a failure or a drain."""

from __future__ import annotations

import pytest

from tests.unit.cache.fakes import FakeDisk
from tests.unit.engine.driver import SteppedEngine, ends_in
from tests.unit.engine.fakes import EOS, FakeFeatures, answer_text, answer_texts, prepared, prompt
from tests.unit.engine.scheduler.situations import bring_to_state, caches_on, finish_all
from vlm_server.cache.caches import Caches
from vlm_server.engine.request.states import LIVE, State
from vlm_server.errors import InternalError, InvalidRequest
from vlm_server.interfaces import SchedulerOutput, SeqId, StepResult
from vlm_server.protocol import Failed, Finished


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
