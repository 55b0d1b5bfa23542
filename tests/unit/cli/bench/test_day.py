"""A bench day consists of whole rounds of equal work, and its drift is compared by kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from tests.unit.cli.scripted_server import ScriptedServer, listening
from vlm_server.cli.bench import day
from vlm_server.cli.bench.day import FIXED_WORK, Day, DaySample, spend_day
from vlm_server.cli.bench.figures import Unit
from vlm_server.cli.bench.material import Material
from vlm_server.cli.bench.servers import BenchTarget, Client

ROUND = {
    **{f"agent, turn {turn}": 1 for turn in range(1, 7)},
    "burst": 4,
    "known picture": 3,
    "new picture": 1,
    "text": 2,
    "text after idle": 1,
}
NUM_FIXED = 3
SLOWNESS = {"fast": 0.02, "slow": 2.0}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(day, "_IDLE_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(day, "_THINK_SECONDS", (0.0, 0.0))


async def spend(app: ScriptedServer, num_rounds: int, seed: int = 1) -> list[DaySample]:
    material = Material((40, 20), seed, day.NAME, 1)
    async with listening(app) as url, Client(BenchTarget("it", url, "m"), 20.0) as client:
        spent = Day(client, material)
        for _ in range(num_rounds):
            await spent.spend_round()
        return spent.samples


async def test_day_rounds_have_equal_work_and_unique_messages():
    app = ScriptedServer()
    samples = await spend(app, 2)
    for number in range(2):
        assert kinds(s for s in samples if s.round == number) == ROUND
        assert sum(s.round == number and s.kind == FIXED_WORK for s in samples) == NUM_FIXED
    messages = [str(request["messages"]) for request in app.requests]
    assert len(set(messages)) == len(messages), "nothing is asked twice"
    one, other = app.requests[: len(messages) // 2], app.requests[len(messages) // 2 :]
    assert sorted(map(size, one)) == sorted(map(size, other))


def kinds(samples: Iterable[DaySample]) -> Counter[str]:
    """The number of requests of each kind, without the fixed work."""
    return Counter(sample.kind for sample in samples if sample.kind != FIXED_WORK)


def size(request: dict[str, Any]) -> tuple[int, int, int]:
    """The numbers of images, messages and answer tokens."""
    shown = str(request["messages"]).count("'image_url':")
    return shown, len(request["messages"]), request["max_tokens"]


async def test_day_ends_with_whole_round():
    app = ScriptedServer()
    async with listening(app) as url, Client(BenchTarget("it", url, "m"), 20.0) as client:
        samples = await spend_day(client, Material((40, 20), 1, day.NAME, 1), 0.001)
    assert kinds(samples) == ROUND


async def test_day_is_reproducible_by_seed():
    first, again, other = ScriptedServer(), ScriptedServer(), ScriptedServer()
    await spend(first, 1)
    await spend(again, 1)
    await spend(other, 1, seed=2)
    assert messages_of(first) == messages_of(again)
    assert messages_of(first) != messages_of(other)


def messages_of(app: ScriptedServer) -> set[str]:
    """The conversations sent, without order: requests of a burst arrive in any order."""
    return {str(request["messages"]) for request in app.requests}


async def test_day_with_failed_requests_has_unknown_figures():
    samples = await spend(ScriptedServer(lambda _: [(0.0, b"no")], status=500), 2)
    assert {sample.kind for sample in samples if sample.ttft is not None} == {FIXED_WORK}
    found = values(samples)
    assert {name for name, value in found.items() if value is not None} == {
        FIXED_WORK,
        f"{FIXED_WORK}: last tenth",
        f"{FIXED_WORK}: slowest tenth against the fastest",
    }


def steady(num_rounds: int, **slower: float) -> list[DaySample]:
    """Two kinds, one a hundred times slower; `slower` multiplies the times of the last tenth."""
    last = num_rounds - num_rounds // 10
    return [
        DaySample(kind, n, float(n), ttft * (slower.get(kind, 1.0) if n >= last else 1.0))
        for n in range(num_rounds)
        for kind, ttft in SLOWNESS.items()
    ]


def values(samples: list[DaySample]) -> dict[str, float | None]:
    return {figure.name: figure.value for figure in day.figures(samples)}


def test_day_without_drift_meets_bar():
    found = values(steady(40))
    assert found["TTFT, last tenth against the first"] == pytest.approx(0.0)
    assert found["within 3%"] == 1.0


@pytest.mark.parametrize(("factor", "is_met"), [(1.029, 1.0), (1.04, 0.0), (0.96, 0.0)])
def test_day_drift_beyond_three_percent_misses_bar(factor: float, is_met: float):
    found = values(steady(40, fast=factor, slow=factor))
    assert found["TTFT, last tenth against the first"] == pytest.approx(100 * (factor - 1))
    assert found["within 3%"] == is_met


def test_day_drift_weights_kinds_equally():
    found = values(steady(40, fast=1.5))
    assert found["TTFT, last tenth against the first"] == pytest.approx(25.0)
    assert found["fast: last tenth"] == pytest.approx(50.0)
    assert found["slow: last tenth"] == pytest.approx(0.0)


def test_day_drift_excludes_fixed_work_of_machine():
    samples = [
        *steady(40, fast=1.02, slow=1.02),
        *(DaySample(FIXED_WORK, n, float(n), 0.001 * (1.5 if n >= 36 else 1.0)) for n in range(40)),
    ]
    found = values(samples)
    assert found["TTFT, last tenth against the first"] == pytest.approx(2.0)
    assert found["slowest tenth against the fastest"] == pytest.approx(2.0)
    assert found[f"{FIXED_WORK}: last tenth"] == pytest.approx(50.0)
    assert found[f"{FIXED_WORK}: slowest tenth against the fastest"] == pytest.approx(50.0)


def test_day_drift_ignores_single_slow_request():
    samples = steady(40)
    samples[-1] = DaySample("slow", 39, 39.0, 60.0)
    assert abs(values(samples)["TTFT, last tenth against the first"] or 0.0) < 0.01


@pytest.mark.parametrize(("num_rounds", "sizes"), [(3, {1}), (10, {1}), (25, {2, 3}), (40, {4})])
def test_day_parts_are_whole_rounds(num_rounds: int, sizes: set[int]):
    parts = day.parts(steady(num_rounds))
    assert len(parts) == min(10, num_rounds)
    assert {len({sample.round for sample in part}) for part in parts} == sizes
    assert {len(part) for part in parts} == {2 * size for size in sizes}


def test_day_of_single_round_has_unknown_drift():
    found = day.figures(steady(1))
    assert {figure.value for figure in found if figure.unit is not Unit.MILLISECONDS} == {None}
