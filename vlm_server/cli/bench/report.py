"""Plan and runs of a bench, as a table that compares servers and as JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import msgspec

from vlm_server.cli.bench.day import DaySample
from vlm_server.cli.bench.figures import Figure, Unit, known_values, median, quotient
from vlm_server.cli.bench.servers import BenchTarget
from vlm_server.cli.client.answer import TimedAnswer
from vlm_server.cli.text import table

_NOTHING = "-"
_VERSIONS = ("vlm-server", "mlx-vlm", "mlx")

_WORDS = {Unit.EQUAL: ("equal", "different"), Unit.MET: ("met", "missed")}
"""Words for a figure that is 1.0 or 0.0 in every round."""

_COMPARED = set(Unit) - {*_WORDS, Unit.PERCENT}
"""Units of figures that are compared by their ratio."""

Key = tuple[str, str, Unit]
"""A figure's scenario, name and unit."""


class BenchPlan(msgspec.Struct, frozen=True):
    """The scenarios to run, by name; size of images in pixels (width, height); length of a day."""

    scenarios: tuple[str, ...]
    rounds: int
    image_size: tuple[int, int]
    seed: int
    day_seconds: float

    def num_runs(self, num_servers: int) -> int:
        """The number of runs that `measure` makes, with the warm-up of each server."""
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
    """The samples of a day; empty for other scenarios."""


def comparison(targets: Sequence[BenchTarget], plan: BenchPlan, runs: Sequence[BenchRun]) -> str:
    """The table of each figure's median [min - max] by server, and its ratio to the first one's."""
    names = [target.name for target in targets]
    rows = [["scenario", "figure", "", names[0]]]
    for name in names[1:]:
        rows[0] += [name, f"/ {names[0]}"]
    scenario = ""
    for (of, figure, unit), values in _by_figure(runs).items():
        cells = _cells(unit, [values.get(name, []) for name in names])
        unit_text = "" if unit in _WORDS else unit.value
        rows.append([of if of != scenario else "", figure, unit_text, *cells])
        scenario = of
    width, height = plan.image_size
    head = (
        f"median [min - max] of {max((run.round for run in runs), default=0)} rounds; "
        f"pictures of {width}x{height}; seed {plan.seed}"
    )
    return "\n".join([head, "", table(rows), "", *_troubles(names, runs)])


def document(targets: Sequence[BenchTarget], plan: BenchPlan, runs: Sequence[BenchRun]) -> bytes:
    """All measurements, as JSON."""
    content: dict[str, Any] = {
        "machine": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "versions": {name: version for name in _VERSIONS if (version := _version(name))},
        "plan": plan,
        "servers": {
            target.name: {"url": target.base_url, "model": target.model} for target in targets
        },
        "figures": [
            {"scenario": scenario, "name": name, "unit": unit, "rounds": values}
            for (scenario, name, unit), values in _by_figure(runs).items()
        ],
        "runs": runs,
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=1)


def progress(run: BenchRun) -> str:
    """The line for a run that has ended."""
    failures = sum(answer.error is not None for answer in run.answers)
    trouble = f", {failures} of {len(run.answers)} requests failed" if failures else ""
    name = f"round {run.round} {run.scenario}" if run.round else run.scenario
    return f"{name}: {run.server} took {run.seconds:.1f} s{trouble}"


def _by_figure(runs: Sequence[BenchRun]) -> dict[Key, dict[str, list[float | None]]]:
    """The values of each figure in all rounds, by server."""
    values: dict[Key, dict[str, list[float | None]]] = {}
    for run in runs:
        for figure in run.figures:
            servers = values.setdefault((run.scenario, figure.name, figure.unit), {})
            servers.setdefault(run.server, []).append(figure.value)
    return values


def _cells(unit: Unit, by_server: Sequence[Sequence[float | None]]) -> list[str]:
    first_median = median(by_server[0])
    cells = [_cell(unit, by_server[0])]
    for values in by_server[1:]:
        ratio = quotient(median(values), first_median) if unit in _COMPARED else None
        cells += [_cell(unit, values), _NOTHING if ratio is None else f"{ratio:.2f}"]
    return cells


def _cell(unit: Unit, values: Sequence[float | None]) -> str:
    present = known_values(values)
    if not present:
        return _NOTHING
    if unit in _WORDS:
        yes, no = _WORDS[unit]
        true, count = int(sum(present)), len(present)
        return {count: yes, 0: no}.get(true, f"{yes} in {true} of {count}")
    middle, low, high = map(_number, (statistics.median(present), min(present), max(present)))
    return middle if len(present) == 1 else f"{middle} [{low} - {high}]"


def _number(value: float) -> str:
    """Three significant digits, with at most two decimals."""
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{decimals}f}"


def _troubles(names: Sequence[str], runs: Sequence[BenchRun]) -> list[str]:
    """Per server, a line with its numbers of requests and failures, then one per error."""
    lines = []
    for name in names:
        answers = [answer for run in runs if run.server == name for answer in run.answers]
        errors = [answer.error for answer in answers if answer.error is not None]
        unknown = sum(a.error is None and a.completion_tokens is None for a in answers)
        lines.append(f"{name}: {len(answers)} requests, {len(errors)} failed")
        if unknown:
            lines[-1] += f", {unknown} answers without usage"
        lines += [f"  {errors.count(error)}x {error}" for error in dict.fromkeys(errors)]
    return lines


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
