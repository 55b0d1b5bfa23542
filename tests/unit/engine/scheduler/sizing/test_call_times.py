"""The store of measured times: the last few of a kind, and none of long ago."""

from __future__ import annotations

import math

from vlm_server.engine.scheduler.sizing.call_times import CallTimes


def test_call_time_is_best_of_last_three():
    times = CallTimes[str](max_age=100)
    assert times.best("a") == math.inf
    times.record("a", 1.0)
    assert not times.is_measured("a"), "the first may wait for a kernel to be compiled"
    for seconds in (5.0, 3.0, 4.0):
        times.record("a", seconds)
    assert times.is_measured("a")
    assert times.best("a") == 3.0


def test_call_times_expire_after_many_other_calls():
    times = CallTimes[str](max_age=3)
    for kind in "aabb":
        times.record(kind, 1.0)
    assert (times.is_measured("a"), times.kinds()) == (False, ["a", "b"])
    times.record("b", 1.0)
    assert times.kinds() == ["b"]
