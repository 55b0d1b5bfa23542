"""Work that hangs keeps its number, and work that gets on does not."""

from __future__ import annotations

from vlm_server.engine.heartbeat import Heartbeat
from vlm_server.platform.child.cancellation import Cancellation


def test_heartbeat_reports_oldest_work_of_every_kind():
    heartbeat = Heartbeat()
    assert heartbeat.read_oldest() == {}
    heartbeat.start("a", "first")
    heartbeat.start("b", "other")
    heartbeat.start("a", "second")
    assert heartbeat.read_oldest() == {"a": 1, "b": 2}
    heartbeat.finish("a", "first")
    assert heartbeat.read_oldest() == {"a": 3, "b": 2}
    assert heartbeat.has_work
    heartbeat.finish("a", "second")
    heartbeat.finish("b", "other")
    heartbeat.finish("b", "nobody")
    assert heartbeat.read_oldest() == {}
    assert not heartbeat.has_work


def test_heartbeat_distinguishes_slow_from_hanging_work():
    heartbeat, of_many, hangs = Heartbeat(), Cancellation(), Cancellation()
    heartbeat.start("preparers", "many images", of_many.num_checks)
    first = heartbeat.read_oldest()
    assert heartbeat.read_oldest() == first
    of_many.check()
    assert heartbeat.read_oldest() != first
    heartbeat.start("preparers", "hangs", hangs.num_checks)
    for _ in range(3):
        of_many.check()
        heartbeat.read_oldest()
    stuck = heartbeat.read_oldest()
    of_many.check()
    assert heartbeat.read_oldest() == stuck, "one of them hangs"
