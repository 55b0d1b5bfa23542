"""Compares the simulation with real daemons: the same users, the same thoughts, the same prompts.

Each round has a seed of its own. What is compared is of all rounds together, and of each alone for
the spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from scripts.simulation.costs import Costs
from scripts.simulation.real.fleet import running
from scripts.simulation.real.replay import Replayed, assignments, replay
from scripts.simulation.simulate import Fleet, Result, simulate
from scripts.simulation.summary import Asked, Summary, summarize
from scripts.simulation.worker import Limits
from scripts.simulation.workload import Workload

FIGURES = ("ttft_p50", "ttft_p99", "hit_rate", "request_rate")
TARGET = 0.15
"""How far the simulation may be from what was measured."""
_BEGIN_SECONDS = 5.0
"""After the first users come, what is asked counts."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What real daemons did. prefix_bytes: of each one's prefix cache; 0 for the usual size."""

    workers: int
    workloads: list[Workload]
    rounds: list[Replayed]
    prefix_bytes: int = 0


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """The same figures of real daemons and of the simulation, of all rounds and of each.

    Seconds of a request are of a core: of what daemons used, and of clients and gateway.
    """

    workers: int
    users: int
    real: Summary
    simulated: Summary
    real_rounds: list[Summary]
    simulated_rounds: list[Summary]
    real_seconds: float
    simulated_seconds: float
    client_seconds: float

    def error(self, figure: str) -> float:
        """Relative, of the simulation."""
        simulated: float = getattr(self.simulated, figure)
        real: float = getattr(self.real, figure)
        return simulated / real - 1


def measure(
    model: Path, workers: int, workloads: Sequence[Workload], prefix_bytes: int
) -> Measured:
    """Each round has new daemons: nothing is cached of the last one."""
    settings = {"cache.max_prefix_bytes": str(prefix_bytes)} if prefix_bytes else {}
    rounds = []
    for workload in workloads:
        with running(model, workers, with_gateway=workers > 1, settings=settings) as fleet:
            rounds.append(replay(fleet, workload))
    return Measured(
        workers=workers, workloads=list(workloads), rounds=rounds, prefix_bytes=prefix_bytes
    )


def compare(measured: Measured, costs: Costs) -> Compared:
    """Simulate what was measured."""
    real = [one.asked for one in measured.rounds]
    num_asked = sum(map(len, real))
    client_seconds = sum(one.client_seconds for one in measured.rounds) / num_asked
    if measured.workers > 1:  # clients and the gateway are on the cores of the daemons
        costs = msgspec.structs.replace(costs, client_request=client_seconds)
    results = [
        simulated(measured, workload, replayed, costs)
        for workload, replayed in zip(measured.workloads, measured.rounds, strict=True)
    ]
    found = [one.asked for one in results]
    seconds = measured.workloads[0].seconds
    return Compared(
        workers=measured.workers,
        users=measured.workloads[0].users,
        real=_pooled(real, seconds),
        simulated=_pooled(found, seconds),
        real_rounds=[_pooled([each], seconds) for each in real],
        simulated_rounds=[_pooled([each], seconds) for each in found],
        real_seconds=sum(one.daemon_seconds for one in measured.rounds) / num_asked,
        simulated_seconds=sum(sum(one.utilisation) * one.seconds for one in results)
        / sum(map(len, found)),
        client_seconds=client_seconds,
    )


def simulated(measured: Measured, workload: Workload, replayed: Replayed, costs: Costs) -> Result:
    """The same, with each conversation on the worker that it had."""
    limits = Limits(prefix_bytes=measured.prefix_bytes) if measured.prefix_bytes else Limits()
    fleet = Fleet(
        workers=measured.workers,
        limits=limits,
        assigned=assignments(replayed),
        one_machine=measured.workers > 1,
    )
    return simulate(costs, workload, fleet)


def _pooled(rounds: Sequence[Sequence[Asked]], seconds: float) -> Summary:
    """Of all requests of all rounds; rates are the mean of the rounds'."""
    whole = summarize([one for asked in rounds for one in asked], _BEGIN_SECONDS, seconds)
    each = [summarize(asked, _BEGIN_SECONDS, seconds) for asked in rounds]
    return msgspec.structs.replace(
        whole,
        request_rate=sum(one.request_rate for one in each) / len(each),
        token_rate=sum(one.token_rate for one in each) / len(each),
    )


def table(compared: Compared) -> str:
    """A line for each figure."""
    found = compared
    lines = [f"{found.workers} daemons, {found.users} users, {found.real.requests} requests"]
    for figure in FIGURES:
        rounds = [getattr(one, figure) for one in found.real_rounds]
        error = found.error(figure)
        lines.append(
            f"  {figure:13}{getattr(found.real, figure):7.3f} "
            f"[{min(rounds):.3f} - {max(rounds):.3f}]  "
            f"simulated {getattr(found.simulated, figure):7.3f} {error:+7.1%}"
            f"{'' if abs(error) <= TARGET else ' MISSED'}"
        )
    lines.append(
        f"  core seconds of a request: {found.real_seconds:.3f}, simulated "
        f"{found.simulated_seconds:.3f}; of clients and gateway {found.client_seconds:.3f}"
    )
    return "\n".join(lines)
