"""Runs of scenarios in rounds over several servers, and their order."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec

from vlm_server.cli.bench import day
from vlm_server.cli.bench.day import NAME as DAY
from vlm_server.cli.bench.day import DaySample, spend_day
from vlm_server.cli.bench.figures import Figure
from vlm_server.cli.bench.material import Material
from vlm_server.cli.bench.scenarios import SCENARIOS, warm_up
from vlm_server.cli.bench.servers import Client
from vlm_server.cli.client.answer import TimedAnswer


class BenchPlan(msgspec.Struct, frozen=True):
    """Scenarios to run, by name; size of images in pixels (width, height); length of a day."""

    scenarios: tuple[str, ...]
    rounds: int
    image_size: tuple[int, int]
    seed: int
    day_seconds: float

    def num_runs(self, num_servers: int) -> int:
        """Number of runs that `measure` makes, with the warm-up of each server."""
        return num_servers * (1 + self.rounds * len(self.scenarios))


class BenchRun(msgspec.Struct, frozen=True):
    """One scenario in one round on one server. Round 0 is the warm-up."""

    scenario: str
    round: int
    server: str
    seconds: float
    figures: list[Figure]
    answers: list[TimedAnswer]
    samples: list[DaySample] = []
    """Of a day."""


async def measure(clients: Sequence[Client], plan: BenchPlan) -> AsyncIterator[BenchRun]:
    """Runs of `plan`. Servers alternate within each scenario, and in which one is first."""
    for client in clients:
        yield await _run("warm-up", 0, client, plan)
    for round_ in range(1, plan.rounds + 1):
        for scenario in plan.scenarios:
            for turn in range(len(clients)):
                client = clients[(round_ - 1 + turn) % len(clients)]
                yield await _run(scenario, round_, client, plan)


async def _run(scenario: str, round_: int, client: Client, plan: BenchPlan) -> BenchRun:
    material = Material(plan.image_size, plan.seed, scenario, round_)
    figures: list[Figure] = []
    samples: list[DaySample] = []
    start = time.perf_counter()
    with _no_collection():
        if scenario in SCENARIOS:
            figures = await SCENARIOS[scenario](client, material)
        elif scenario == DAY:
            samples = await spend_day(client, material, plan.day_seconds)
            figures = day.figures(samples)
        else:
            await warm_up(client, material)
    seconds = time.perf_counter() - start
    name, answers = client.target.name, client.take_answers()
    return BenchRun(scenario, round_, name, seconds, figures, answers, samples)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keep pauses of the garbage collector out of the times."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
