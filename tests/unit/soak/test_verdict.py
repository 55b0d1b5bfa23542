"""Each fault misses exactly the criterion that is for it."""

from __future__ import annotations

import msgspec
import pytest

from tests.soak.readings import Reading
from tests.soak.run import Result
from tests.soak.verdict import is_passed, judge, slope
from tests.unit.soak.results import FAILURE, LEAVER, MB, answered, growing, reading, result

ENOUGH = [answered()] * 2000


def missed_criteria(soak_result: Result) -> list[str]:
    return [criterion.name for criterion in judge(soak_result) if criterion.is_met is False]


def test_steady_soak_meets_every_criterion():
    soak_result = result([*ENOUGH, LEAVER], between=growing(0.5))
    assert missed_criteria(soak_result) == []
    assert is_passed(judge(soak_result))
    assert all(criterion.is_met for criterion in judge(soak_result))


@pytest.mark.parametrize(
    ("soak_result", "name"),
    [
        (result([answered(), FAILURE]), "failures"),
        (result([]), "failures"),
        (result(end=reading(tracked=1)), "orphans at the end"),
        (result(end=reading(in_flight=1)), "orphans at the end"),
        (result(end=reading(restarts=1)), "engine restarts"),
        (result(end=reading(active_bytes=61 * MB)), "active memory, end to start"),
        (result(end=reading(active_bytes=59 * MB)), "active memory, end to start"),
        (result(start=None), "active memory, end to start"),
        (result(ENOUGH, between=growing(1.1)), "footprint after 1,000 requests, MB per 1,000"),
        (result(ENOUGH, growing(0.5)), "footprint after 1,000 requests, MB per 1,000"),
    ],
)
def test_soak_fault_misses_exactly_one_criterion(soak_result: Result, name: str):
    assert missed_criteria(soak_result) == [name]
    assert not is_passed(judge(soak_result))


def test_soak_without_final_reading_misses_three_criteria():
    assert len(missed_criteria(result(end=None))) == 3


def test_small_active_memory_change_meets_criterion():
    assert missed_criteria(result(end=reading(active_bytes=60 * MB + MB // 2))) == []


def test_footprint_slope_of_short_run_is_not_judged():
    soak_result = result(ENOUGH[:1999], between=growing(50))
    assert missed_criteria(soak_result) == []
    assert [criterion.is_met for criterion in judge(soak_result)].count(None) == 1


def test_footprint_slope_ignores_first_thousand_requests():
    assert slope(growing(2.5)) == pytest.approx(2.5)
    assert slope(growing(-1.0)) == pytest.approx(-1.0)


def test_footprint_slope_skips_missing_readings():
    assert slope([*growing(2.5), None]) == pytest.approx(2.5)


@pytest.mark.parametrize(
    "rests", [[], [reading(1000)], [reading(1000)] * 2, growing(2.5, most=1000)]
)
def test_footprint_slope_of_few_readings_is_unknown(rests: list[Reading]):
    assert slope(rests) is None


def test_footprint_slope_without_engine_footprint_is_unknown():
    silent = [reading(count, engine_footprint_bytes=None) for count in (1000, 2000)]
    assert slope(silent) is None


def test_footprint_slope_uses_engine_alone_if_front_is_unknown():
    rests = [msgspec.structs.replace(r, front_footprint_bytes=None) for r in growing(2.5)]
    assert slope(rests) == pytest.approx(2.5)
