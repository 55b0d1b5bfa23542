"""Media that are encoded in turns with decode steps, on the thread that does both."""

from __future__ import annotations

import gc
import math
import weakref
from queue import SimpleQueue

import pytest

from tests.unit.engine.driver import SteppedEngine
from tests.unit.engine.fakes import FakeEncoder, FakeEncoding, prepared, prompt
from vlm_server.engine.encoding import EncoderInTurns
from vlm_server.engine.inbox import EncodeDone, InboxMessage
from vlm_server.errors import InternalError, OutOfMemory, RequestError
from vlm_server.interfaces import EncodeWork
from vlm_server.protocol import Failed, Finished


class EncodeTurns:
    """An encoder that takes turns, with a fake model."""

    def __init__(self, num_parts: int = 3) -> None:
        self.model = FakeEncoder(num_parts=num_parts)
        self.inbox = SimpleQueue[InboxMessage]()
        self.encoder = EncoderInTurns(self.model, self.inbox)
        request = prepared(prompt(images=3))
        self.works = [
            EncodeWork("a", index, request.prompt, request.inputs[index]) for index in range(3)
        ]

    def turn(self, *, is_alone: bool = False) -> int:
        """The number of parts launched until now."""
        self.encoder.advance_encode(is_alone=is_alone)
        return self.model.encodings[-1].num_launched

    def done(self) -> EncodeDone:
        assert not self.encoder.has_parts_left
        message = self.inbox.get_nowait()
        assert isinstance(message, EncodeDone)
        assert self.inbox.empty()
        return message


@pytest.mark.parametrize("is_alone", [False, True])
def test_every_turn_launches_one_part_of_encode(is_alone: bool):
    turns = EncodeTurns(num_parts=3)
    assert not turns.encoder.has_parts_left
    turns.encoder.start(turns.works)
    assert turns.encoder.has_parts_left
    assert [turns.turn(is_alone=is_alone) for _ in range(3)] == [1, 2, 3]
    assert turns.inbox.empty(), "the device works on the last part"
    turns.turn(is_alone=is_alone)
    done = turns.done()
    assert done.encodes == turns.works
    assert len(done.outcomes) == 3
    assert (done.seconds is not None) == is_alone, "others used the device meanwhile"


def test_encode_interrupted_by_step_is_not_measured():
    turns = EncodeTurns(num_parts=2)
    turns.encoder.start(turns.works[:1])
    for is_alone in (True, False, True):
        turns.turn(is_alone=is_alone)
    assert turns.done().seconds is None


def test_next_encode_starts_with_its_first_part():
    turns = EncodeTurns(num_parts=2)
    for _ in range(2):
        turns.encoder.start(turns.works[:1])
        assert [turns.turn() for _ in range(2)] == [1, 2]
        turns.turn()
        turns.done()
    assert len(turns.model.encodings) == 2


def test_encoder_keeps_no_reference_to_returned_features():
    turns = EncodeTurns(num_parts=1)
    turns.encoder.start(turns.works[:1])
    turns.turn()
    turns.turn()
    features = weakref.ref(turns.done().outcomes[0])
    gc.collect()
    assert features() is None


def test_advance_encode_without_work_does_nothing():
    turns = EncodeTurns()
    turns.encoder.advance_encode(is_alone=False)
    assert not turns.model.encodings
    assert turns.inbox.empty()


def test_failed_encode_batch_is_repeated_image_by_image():
    turns = EncodeTurns(num_parts=1)
    turns.model.bad = {turns.works[1].span.mm_hash}
    turns.encoder.start(turns.works)
    num_turns = 0
    while turns.encoder.has_parts_left:
        turns.turn(is_alone=True)
        num_turns += 1
    assert num_turns == 4 * 2
    done = turns.done()
    assert [isinstance(one, InternalError) for one in done.outcomes] == [False, True, False]
    assert done.seconds == math.inf
    assert turns.model.calls == [3, 1, 1, 1]


@pytest.mark.parametrize("name", ["advance", "result"])
@pytest.mark.parametrize(
    "error", [OutOfMemory("none left"), RuntimeError("a bug")], ids=["out of memory", "bug"]
)
def test_failed_encode_part_returns_its_error(
    monkeypatch: pytest.MonkeyPatch, name: str, error: Exception
):
    def fail(self: FakeEncoding) -> None:
        raise error

    monkeypatch.setattr(FakeEncoding, name, fail)
    turns = EncodeTurns(num_parts=1)
    turns.encoder.start(turns.works[:1])
    while turns.encoder.has_parts_left:
        turns.turn()
    (outcome,) = turns.done().outcomes
    assert isinstance(outcome, type(error) if isinstance(error, RequestError) else InternalError)


# ---- in the loop -----------------------------------------------------------------------


def engine_in_turns(num_parts: int) -> tuple[SteppedEngine, FakeEncoder]:
    engine, model = SteppedEngine(), FakeEncoder(num_parts=num_parts)
    engine.encoder = EncoderInTurns(model, engine.inbox)  # type: ignore[assignment]
    engine.loop = engine.new_loop()
    return engine, model


def image_during_text(num_parts: int) -> tuple[SteppedEngine, FakeEncoder]:
    """ "a" decodes, and the image of "b" is begun."""
    engine, model = engine_in_turns(num_parts)
    engine.add("a", max_tokens=100, ignore_eos=True)
    engine.step_until(lambda: bool(engine.runner.seqs))
    engine.add("b", images=1)
    engine.step_until(lambda: bool(model.encodings))
    return engine, model


def test_encode_parts_run_between_decode_steps():
    engine, model = image_during_text(num_parts=4)
    before = len(engine.plans)
    engine.step_until(lambda: bool(model.calls))
    assert len(engine.plans) - before == 4
    assert all(plan.decode for plan in engine.plans[before:])
    engine.run()
    assert engine.ended == ["b", "a"]


def test_progress_of_encoding_request_counts_tokens_of_its_media():
    engine, _ = engine_in_turns(num_parts=2)
    engine.add("a", images=2)
    reports = []

    def is_over() -> bool:
        reports.extend(engine.scheduler.stats().progress)
        return engine.ended == ["a"]

    engine.step_until(is_over)
    (total,) = {one.total for one in reports if one.state == "encoding"}
    done = [one.done for one in reports if one.state == "encoding"]
    assert total > 0
    assert done == sorted(done)
    assert set(done) == {0, total // 2}


def test_loop_continues_with_only_encode_to_do():
    engine, model = engine_in_turns(num_parts=4)
    engine.add("a", images=2)
    engine.step_until(lambda: engine.ended == ["a"])
    engine.run()
    assert model.calls == [1, 1]
    assert engine.num_tracked == 0


def test_request_arriving_during_encode_is_accepted():
    engine, model = engine_in_turns(num_parts=100)
    engine.add("a", images=1)
    engine.step_until(lambda: bool(model.encodings))
    engine.add("b")
    engine.step_until(lambda: len(engine.ended) == 2)
    assert engine.ended == ["b", "a"]


def test_encode_of_aborted_request_completes_and_is_dropped():
    engine, model = image_during_text(num_parts=4)
    engine.abort("b")
    engine.run()
    assert model.calls == [1]
    assert engine.num_tracked == 0


def test_encode_failing_between_steps_fails_only_its_request():
    engine, model = engine_in_turns(num_parts=2)
    model.fails = True
    engine.add("a", max_tokens=20, ignore_eos=True)
    engine.add("b", images=1)
    engine.run()
    ends = {event.request_id: event for event in engine.events if hasattr(event, "request_id")}
    assert isinstance(ends["a"], Finished)
    assert isinstance(ends["b"], Failed)
