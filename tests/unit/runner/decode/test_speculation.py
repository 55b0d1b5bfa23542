"""How many drafts are worth verifying."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vlm_server.runner.decode import speculation
from vlm_server.runner.decode.speculation import (
    Speculation,
    StepTimes,
    best_width,
    expected_tokens,
)

WIDTHS = (2, 3, 4, 6, 8, 12, 16)


def measured(slope: float, rows: int = 1) -> StepTimes:
    """Each further token of a row takes `slope` steps."""
    times = StepTimes()
    for _ in range(50):
        times.record(rows, 1, 0.01)
        times.record(rows, 8, 0.01 * (1 + 7 * slope))
    return times


def test_expected_tokens_sum_cumulative_probabilities():
    assert expected_tokens([]) == 1.0
    assert expected_tokens([0.5, 0.5]) == 1.75
    assert expected_tokens([1.0] * 7) == 8.0


def test_step_times_learn_cost_of_widths():
    times = measured(0.3)
    assert times.cost(1, 1) == 1.0
    assert times.cost(1, 8) == pytest.approx(3.1, rel=0.05)
    assert times.cost(2, 8) == StepTimes().cost(2, 8)


def test_step_times_keep_separate_costs_per_width():
    """Kernels change at some widths."""
    times = StepTimes()
    for _ in range(50):
        times.record(1, 1, 0.01)
        times.record(1, 4, 0.011)
        times.record(1, 8, 0.03)
    assert times.cost(1, 4) == pytest.approx(1.1, rel=0.05)
    assert times.cost(1, 8) == pytest.approx(3.0, rel=0.05)
    assert best_width((2, 4, 8), [[0.95] * 7], times) == 4


def test_single_outlier_step_time_is_forgotten():
    times = measured(0.1)
    times.record(1, 1, 1.0)
    assert times.cost(1, 8) == pytest.approx(1.7, rel=0.05)


def test_disturbed_wide_steps_are_tried_again():
    disturbed = StepTimes()
    disturbed.record(1, 1, 0.01)
    for _ in range(20):
        disturbed.record(1, 8, 5.0)
    rejected = 0
    while best_width(WIDTHS, [[0.9] * 15], disturbed) == 1:
        disturbed.reject(1)
        rejected += 1
    assert 500 <= rejected <= 20_000


class Drafting:
    """A sequence whose drafts have these chances."""

    def __init__(self, chance: float) -> None:
        self.drafter = SimpleNamespace(
            probability=chance,
            guess=lambda count: [7] * count,
            probabilities=lambda count: [chance] * count,
        )
        self.sampler = SimpleNamespace(matcher=None)
        self.newest_token_followed = False

    def num_useful_drafts(self, limit: int) -> int:
        return limit


def test_time_of_single_wide_steps_among_plain_steps_is_measured(monkeypatch: pytest.MonkeyPatch):
    """In prose they stand alone. Each begins where the plain step ends that ran ahead of it.

    On this device a wide step takes as long as plain steps: drafts have to stop.
    """
    now = 0.0
    monkeypatch.setattr(speculation.time, "perf_counter", lambda: now)
    model = Speculation(WIDTHS)
    seqs: list[Any] = [Drafting(0.8)]
    num_wide = 0
    for _ in range(50):
        for _ in range(3):
            model.record_step(1, 1)
            now += 0.01
        if not model.can_gain(seqs):
            continue
        now += 0.007
        choice = model.drafts(seqs, frozenset())
        assert choice is not None
        width, _ = choice
        now += 0.01 * width
        model.record_step(1, width)
        num_wide += 1
    assert num_wide < 10


@pytest.mark.parametrize(
    ("slope", "chance", "width"),
    [(0.02, 1.0, 16), (0.02, 0.1, 1), (1.0, 1.0, 1), (0.1, 0.8, 6), (0.8, 0.9, 1)],
)
def test_best_draft_width_follows_hit_rates_and_step_times(slope: float, chance: float, width: int):
    found = best_width(WIDTHS, [[chance] * 15], measured(slope))
    assert found == width or (width > 1 and abs(found - width) <= 2)


def test_rows_without_drafts_count_towards_best_width():
    times = measured(0.3, rows=4)
    assert best_width(WIDTHS, [[0.95] * 15] * 4, times) > 1
    assert best_width(WIDTHS, [[0.95] * 15, [], [], []], times) == 1


def test_best_draft_width_is_bounded_by_longest_draft():
    times = measured(0.01)
    assert best_width(WIDTHS, [[1.0, 1.0]], times) == 3
    assert best_width(WIDTHS, [[]], times) == 1
    assert best_width((8,), [[1.0] * 3], times) == 8
