"""Buckets, checked against the library's own histogram."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as LibraryHistogram

from vlm_server.api.http.model_metrics import SECONDS, TOKENS, Histogram


@pytest.mark.parametrize("bounds", [SECONDS, TOKENS], ids=["seconds", "tokens"])
def test_histogram_counts_like_prometheus_library(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))
    ours = Histogram(bounds)
    registry = CollectorRegistry()
    theirs = LibraryHistogram("x", "x", buckets=bounds, registry=registry)
    rng = random.Random(0)
    values = [*bounds, 0.0, 2 * bounds[-1], *(rng.lognormvariate(0, 3) for _ in range(1000))]
    for value in values:
        ours.observe(value)
        theirs.observe(value)
    (family,) = registry.collect()
    expected = [s.value for s in family.samples if s.name == "x_bucket"]
    assert [count for _, count in ours.buckets()] == expected
    assert [float(name) for name, _ in ours.buckets()] == [*bounds, float("inf")]
    assert (ours.count, ours.sum) == (len(values), pytest.approx(sum(values)))


def test_percentiles_are_those_of_last_values() -> None:
    histogram = Histogram(SECONDS, num_recent=100)
    assert histogram.percentiles() is None
    for value in [*(1e6 for _ in range(50)), *range(100, 0, -1)]:
        histogram.observe(float(value))
    expected = {"count": 100, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
    assert histogram.percentiles() == expected
    few = Histogram(SECONDS, num_recent=100)
    few.observe(2.0)
    few.observe(1.0)
    assert few.percentiles() == expected | {
        "count": 2,
        "p50": 1.0,
        **dict.fromkeys(("p90", "p95", "p99", "max"), 2.0),
    }
