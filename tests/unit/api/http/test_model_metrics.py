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
