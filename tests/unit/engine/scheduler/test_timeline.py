"""The reported phases of a request's time, and the counts of cached media."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.clock import Clock
from tests.unit.engine.driver import SteppedEngine
from tests.unit.engine.fakes import prompt
from tests.unit.engine.scheduler.test_ends import timed_engine
from vlm_server.cache.caches import Caches
from vlm_server.engine.request.states import State
from vlm_server.protocol import Finished, Timeline


def timeline_of(engine: SteppedEngine, name: str) -> Timeline:
    (end,) = [e for e in engine.events if isinstance(e, Finished) and e.request_id == name]
    return end.timeline


def seconds_of(timeline: Timeline) -> dict[str, float]:
    """The seconds of each phase that took any."""
    seconds = Counter[str]()
    for phase in timeline.phases:
        seconds[phase.name] += phase.seconds
    return dict(+seconds)


@pytest.fixture
def timed() -> tuple[SteppedEngine, Clock]:
    engine, clock = timed_engine()
    engine.caches = Caches()
    engine.preparers.outcome = None
    engine.encoder.is_fast = False
    return engine, clock


def prepare(engine: SteppedEngine, clock: Clock, name: str, seconds: float) -> None:
    clock.now += seconds
    engine.preparers.finish(name)
    engine.step()


def test_every_second_belongs_to_exactly_one_phase(timed: tuple[SteppedEngine, Clock]) -> None:
    engine, clock = timed
    engine.add("a", images=1)
    engine.step()
    prepare(engine, clock, "a", 3)
    clock.now += 4
    engine.encoder.finish()
    engine.step_until(lambda: engine.state_of("a") is State.DECODE)
    clock.now += 5
    engine.run()
    timeline = timeline_of(engine, "a")
    assert timeline.began_at == 1000
    assert seconds_of(timeline) == {"prepare": 3, "encode": 4, "decode": 5}
    assert [phase.name for phase in timeline.phases] == [
        "queue", "prepare", "queue", "encode", "prefill", "decode"
    ]  # fmt: skip


def test_request_is_in_queue_phase_until_device_work_begins(
    timed: tuple[SteppedEngine, Clock],
) -> None:
    """Admitted at once, the second waits until the encoder has done with the first."""
    engine, clock = timed
    engine.add("a", "b", images=1)
    engine.step()
    prepare(engine, clock, "a", 1)
    prepare(engine, clock, "b", 1)
    clock.now += 7
    while engine.encoder.work is not None and engine.encoder.work.request_id == "a":
        engine.encoder.finish()
        engine.step()
    engine.step_until(lambda: engine.encoder.work is not None)
    clock.now += 2
    engine.encoder.finish()
    engine.run()
    assert seconds_of(timeline_of(engine, "b")) == {"prepare": 2, "queue": 7, "encode": 2}


def test_media_and_cached_media_are_counted() -> None:
    engine = SteppedEngine(Caches(encoder_bytes=1 << 20))
    for name, images in (("a", 2), ("b", 2), ("c", 3), ("d", 0)):
        engine.add_prepared(name, prompt(name, images))
        engine.run()
    counts = engine.scheduler.stats()
    assert (counts.media_items, counts.cached_media_items) == (7, 4)
    assert len(engine.encoder.done) == 3
    engine.scheduler.reset_stats()
    counts = engine.scheduler.stats()
    assert (counts.media_items, counts.cached_media_items) == (0, 0)
