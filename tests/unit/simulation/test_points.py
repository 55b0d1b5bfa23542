"""Points of a load curve are summarized, and its knee is found."""

from __future__ import annotations

import pytest

from scripts.simulation.points import Point, knee, point, spread
from scripts.simulation.summary import Asked, summarize

pytestmark = pytest.mark.unit


def at(users: int, p99: float) -> Point:
    samples = [
        Asked(
            key="",
            turn=0,
            worker="",
            sent=1.0,
            ttft=p99,
            ended=2.0,
            prompt_tokens=100,
            cached_tokens=25,
            answer_tokens=4,
        )
    ]
    return point(users, [(summarize(samples, 0, 5), 0.5)])


def test_knee_precedes_first_slow_point():
    points = [at(1, 0.2), at(2, 0.3), at(4, 0.59), at(8, 0.61), at(16, 0.5)]
    times = [measured.ttft_p99 for measured in points]
    assert knee(points, times, 3) == 4
    assert knee(points, times, 100) == 16


def test_summary_counts_only_requests_sent_in_window():
    samples = [
        Asked(
            key="",
            turn=0,
            worker="",
            sent=float(n),
            ttft=0.1 * n,
            ended=n + 1.0,
            prompt_tokens=100,
            cached_tokens=10 * n,
            answer_tokens=4,
        )
        for n in range(8)
    ]
    found = summarize(samples, 2, 5)
    assert found.requests == 3
    assert found.ttft_p50 == pytest.approx(0.3)
    assert found.hit_rate == pytest.approx(0.3)
    assert found.request_rate == pytest.approx(3 / 3)
    assert found.token_rate == pytest.approx(12 / 3)


def test_spread_has_median_least_and_most():
    found = spread([3.0, 1.0, 2.0])
    assert (found.median, found.least, found.most) == (2.0, 1.0, 3.0)
