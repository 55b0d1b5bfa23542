"""What `docs/scale.md` shows: where one machine's knees are, and what more of them do.

Every figure is of several seeds: its median, least and most.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import msgspec

from scripts.simulation import plot
from scripts.simulation.costs import Costs
from scripts.simulation.gateway import Policy
from scripts.simulation.points import Curve, Point, knee, point
from scripts.simulation.simulate import Fleet, simulate
from scripts.simulation.summary import Summary, summarize
from scripts.simulation.worker import Limits
from scripts.simulation.workload import Workload

USERS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
SIZES = ((280, 224), (448, 336), (560, 420))
PICTURES = (1, 2, 4)
TURNS = (3, 6, 12, 24)
THINK_SECONDS = (2.0, 8.0)
WORKERS = (1, 2, 4, 8, 16, 32, 64)
CACHE_TOKENS = (2_000, 4_000, 8_000, 16_000)
LOST_OF = (2, 4, 8, 16)
KNEE = 3.0
"""More users than the knee: TTFT p99 is more than so many times that of one user."""
FLAT = 1.25
"""Likewise of the median."""
_SECONDS = 200.0
_BEGIN_SECONDS = 20.0
_LOST_AT = 100.0
_WINDOW_SECONDS = 10.0

Curves = dict[str, Curve]


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """Curves by what they are of. All but `fleets` and `losses` are of one worker, by users."""

    pictures: Curves
    sizes: Curves
    turns: Curves
    thinking: Curves
    caches: Curves
    users_per_worker: int
    """Of `fleets` and `losses`."""
    fleets: Curves
    """By workers."""
    losses: Curves
    """By the end of the window in which was asked, in seconds after one worker was lost."""


@dataclass(frozen=True)
class _Case:
    costs: Costs
    workload: Workload
    fleet: Fleet

    def run(self) -> tuple[Summary, float]:
        result = simulate(self.costs, self.workload, self.fleet)
        summary = summarize(result.asked, _BEGIN_SECONDS, self.workload.seconds)
        return summary, sum(result.utilisation) / len(result.utilisation)

    def windows(self) -> list[tuple[float, Summary]]:
        """Of each of equal parts of the time."""
        asked = simulate(self.costs, self.workload, self.fleet).asked
        begins = [n * _WINDOW_SECONDS for n in range(int(_SECONDS // _WINDOW_SECONDS))]
        return [
            (begin + _WINDOW_SECONDS - _LOST_AT, summarize(asked, begin, begin + _WINDOW_SECONDS))
            for begin in begins
            if begin >= _BEGIN_SECONDS
        ]


def study(costs: Costs, out: Path, num_seeds: int) -> None:
    """Write `study.json`, and drawings of it, into the folder `out`."""
    with _Students(costs, num_seeds) as students:
        found = students.study()
    (out / "study.json").write_bytes(msgspec.json.encode(found) + b"\n")
    groups = {
        "new pictures in each turn": found.pictures,
        "pixels of a picture": found.sizes,
        "turns of a conversation": found.turns,
        "thinking before each turn": found.thinking,
    }
    plot.one_machine(groups, out / "knees.png")
    plot.caches(found.caches, out / "cache.png")
    plot.fleets(found.fleets, out / "workers.png")
    plot.losses(found.losses, out / "loss.png")


class _Students:
    """Run cases, as many at once as this machine has cores."""

    def __init__(self, costs: Costs, num_seeds: int) -> None:
        self._costs = costs
        self._seeds = range(num_seeds)
        self._pool = ProcessPoolExecutor()
        self._known: dict[tuple[Workload, int], Curve] = {}

    def __enter__(self) -> _Students:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def study(self) -> Study:
        usual = Workload(users=1, seconds=_SECONDS)
        pictures = {
            f"{number} of 280 by 224": self._by_users(replace(usual, pictures=number))
            for number in PICTURES
        }
        users = max(1, next(iter(pictures.values())).knee)
        return Study(
            pictures=pictures,
            sizes={
                f"{width} by {height}": self._by_users(replace(usual, width=width, height=height))
                for width, height in SIZES
            },
            turns={f"{n} turns": self._by_users(replace(usual, turns=n)) for n in TURNS},
            thinking={
                f"{seconds:g} s": self._by_users(replace(usual, think_seconds=seconds))
                for seconds in THINK_SECONDS
            },
            caches={
                f"{tokens:,} tokens": self._by_users(usual, prefix_tokens=tokens)
                for tokens in CACHE_TOKENS
            },
            users_per_worker=users,
            fleets={
                policy.value: self._by_workers(replace(usual, users=users), policy)
                for policy in Policy
            },
            losses={
                f"1 of {number} lost": self._of_loss(replace(usual, users=users * number), number)
                for number in LOST_OF
            },
        )

    def _by_users(self, workload: Workload, prefix_tokens: int = 0) -> Curve:
        """Looked at once, in however many groups it is."""
        asked = workload, prefix_tokens
        if asked not in self._known:
            self._known[asked] = self._new_by_users(workload, prefix_tokens)
        return self._known[asked]

    def _new_by_users(self, workload: Workload, prefix_tokens: int) -> Curve:
        size = prefix_tokens * self._costs.kv_bytes_per_token
        fleet = Fleet(limits=Limits(prefix_bytes=size)) if prefix_tokens else Fleet()
        cases = [(users, replace(workload, users=users), fleet) for users in USERS]
        points = self._points(cases)
        return Curve(
            points=points,
            knee=knee(points, [each.ttft_p99 for each in points], KNEE),
            flat=knee(points, [each.ttft_p50 for each in points], FLAT),
        )

    def _by_workers(self, workload: Workload, policy: Policy) -> Curve:
        cases = [
            (n, replace(workload, users=workload.users * n), Fleet(workers=n, policy=policy))
            for n in WORKERS
        ]
        return Curve(points=self._points(cases))

    def _points(self, cases: Sequence[tuple[int, Workload, Fleet]]) -> list[Point]:
        seeded = [
            _Case(self._costs, replace(workload, seed=seed), fleet)
            for (_, workload, fleet), seed in product(cases, self._seeds)
        ]
        found = iter(list(self._pool.map(_Case.run, seeded)))
        return [point(at, [next(found) for _ in self._seeds]) for at, *_ in cases]

    def _of_loss(self, workload: Workload, workers: int) -> Curve:
        fleet = Fleet(workers=workers, lost_at=_LOST_AT)
        cases = [_Case(self._costs, replace(workload, seed=seed), fleet) for seed in self._seeds]
        found = self._pool.map(_Case.windows, cases)
        points = [
            point(windows[0][0], [(summary, 0.0) for _, summary in windows])
            for windows in zip(*found, strict=True)
        ]
        return Curve(points=points)
