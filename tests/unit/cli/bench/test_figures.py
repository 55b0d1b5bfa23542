"""Missing values make a figure unknown, never wrong."""

from __future__ import annotations

import pytest

from vlm_server.cli.bench import figures
from vlm_server.cli.bench.figures import Figure, Unit


def test_median_skips_missing_values():
    assert figures.median([3.0, None, 1.0, 2.0]) == 2.0
    assert figures.median([None]) is None


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (1, 1), (50, 50), (99, 99), (100, 100)])
def test_percentile_of_hundred_values_is_exact(percent: float, value: float):
    assert figures.percentile(range(100, 0, -1), percent) == value


def test_percentile_of_few_values_is_largest_or_unknown():
    assert figures.percentile([2.0, 1.0], 99) == 2.0
    assert figures.percentile([], 99) is None


def test_largest_skips_missing_values():
    assert figures.largest([1.0, None, 4.0]) == 4.0
    assert figures.largest([None]) is None


def test_mean_is_unknown_if_any_value_is_missing():
    assert figures.mean([1.0, 2.0, 6.0]) == 3.0
    assert figures.mean([1.0, None]) is None
    assert figures.mean([]) is None


def test_percent_is_relative_to_one():
    assert figures.percent("p", 1.25) == Figure("p", 25.0, Unit.PERCENT)
    assert figures.percent("p", 0.5).value == -50.0
    assert figures.percent("p", None).value is None


def test_ratio_is_unknown_without_operands_or_by_zero():
    assert figures.ratio("r", 3.0, 2.0) == Figure("r", 1.5, Unit.RATIO)
    assert figures.ratio("r", None, 2.0).value is None
    assert figures.ratio("r", 3.0, 0.0).value is None


def test_milliseconds_are_converted_from_seconds():
    assert figures.milliseconds("t", 0.25) == Figure("t", 250.0, Unit.MILLISECONDS)
    assert figures.milliseconds("t", None).value is None


def test_throughput_is_unknown_if_any_count_is_missing():
    assert figures.throughput("t", [30, 10], 2.0).value == 20.0
    assert figures.throughput("t", [30, None], 2.0).value is None
    assert figures.throughput("t", [], 2.0).value is None


def test_equality_compares_pairs_of_texts():
    assert figures.equality("e", [("a", "a"), ("b", "b")]).value == 1.0
    assert figures.equality("e", [("a", "a"), ("b", "c")]).value == 0.0
    assert figures.equality("e", [("a", None)]).value is None
