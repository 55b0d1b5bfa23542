"""Work that hangs keeps its number, and work that gets on does not."""

from __future__ import annotations

from vlm_server.engine.at_work import AtWork
from vlm_server.platform.child.cancellation import Cancellation


def test_the_oldest_of_each_kind_is_told():
    at_work = AtWork()
    assert at_work.read_oldest() == {}
    at_work.begin("a", "first")
    at_work.begin("b", "other")
    at_work.begin("a", "second")
    assert at_work.read_oldest() == {"a": 1, "b": 2}
    at_work.end("a", "first")
    assert at_work.read_oldest() == {"a": 3, "b": 2}
    assert at_work.is_anything
    at_work.end("a", "second")
    at_work.end("b", "other")
    at_work.end("b", "nobody")
    assert at_work.read_oldest() == {}
    assert not at_work.is_anything


def test_long_work_that_gets_on_is_told_from_work_that_hangs():
    at_work, of_many, hangs = AtWork(), Cancellation(), Cancellation()
    at_work.begin("preparers", "many pictures", of_many.num_checks)
    first = at_work.read_oldest()
    assert at_work.read_oldest() == first
    of_many.check()
    assert at_work.read_oldest() != first
    at_work.begin("preparers", "hangs", hangs.num_checks)
    for _ in range(3):
        of_many.check()
        at_work.read_oldest()
    stuck = at_work.read_oldest()
    of_many.check()
    assert at_work.read_oldest() == stuck, "one of them hangs"
