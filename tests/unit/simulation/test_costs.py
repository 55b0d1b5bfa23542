"""Cost coefficients are fitted from measured times, and survive a file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from scripts.simulation import costs
from scripts.simulation.command import COSTS
from tests.unit.simulation import agents

pytestmark = pytest.mark.unit


def test_cost_fit_recovers_coefficients():
    drawn = random.Random(3)
    rows = [(1, n, n * n) for n in (10, 20, 50, 100, 200, 400) for _ in range(5)]
    exact = [0.02 + 0.001 * n + 1e-6 * square for _, n, square in rows]
    noisy = [seconds * drawn.uniform(0.95, 1.05) for seconds in exact]
    assert costs.fit(rows, exact) == pytest.approx((0.02, 0.001, 1e-6))
    assert costs.misfit(rows, exact, costs.fit(rows, exact)) == pytest.approx(0, abs=1e-9)
    assert costs.misfit(rows, noisy, costs.fit(rows, noisy)) == pytest.approx(0.025, abs=0.015)


def test_cost_fit_has_no_negative_coefficient():
    rows = [(1, n) for n in (100, 200, 300)]
    found = costs.fit(rows, [0.05, 0.15, 0.25])
    assert found[0] == 0
    assert found[1] > 0


def test_costs_round_trip_through_file(tmp_path: Path):
    wanted = agents.costs(slowdown=1.2)
    costs.write(wanted, tmp_path / "costs.json")
    assert costs.read(tmp_path / "costs.json") == wanted


def test_measured_costs_file_is_plausible():
    found = costs.read(COSTS)
    assert found.encode_seconds(80) > 0
    assert found.prefill_seconds(100, 1000, 1000) > found.prefill_seconds(100, 0)
    assert found.decode_seconds(8, 1000) > found.decode_seconds(1, 1000) > 0
    assert found.merge_seconds(1, 1000) == 0
    assert found.slowdown >= 1
