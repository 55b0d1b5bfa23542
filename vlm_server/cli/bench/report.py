"""Plan and runs of a bench, as a table that compares servers and as JSON."""

from __future__ import annotations

import os
import platform
import statistics
import textwrap
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import msgspec

from vlm_server.cli.bench import words
from vlm_server.cli.bench.day import DaySample
from vlm_server.cli.bench.figures import Figure, Unit, known_values, median, quotient
from vlm_server.cli.bench.servers import BenchTarget
from vlm_server.cli.client.answer import TimedAnswer
from vlm_server.cli.text import table

_NOTHING = "-"
_MIN_NAME = 24
_VERSIONS = ("vlm-server", "mlx-vlm", "mlx")
_YES_OR_NO = (Unit.EQUAL, Unit.MET)
"""Units of figures that are 1.0 or 0.0 in every round."""
_COMPARED = set(Unit) - {*_YES_OR_NO, Unit.PERCENT}
"""Units of figures that are compared by their ratio."""
_UNITS = {Unit.RATIO: "times", **dict.fromkeys(_YES_OR_NO, "")}
"""Units that are printed otherwise than they are stored."""

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


def comparison(
    targets: Sequence[BenchTarget],
    plan: BenchPlan,
    runs: Sequence[BenchRun],
    columns: int | None = None,
) -> str:
    """The table of each figure's median [lowest - highest] by server, under each scenario's words.

    Other servers are compared with the first one. Words and names are wrapped at `columns`.
    """
    names = [target.name for target in targets]
    by_figure = {
        key: values
        for key, values in _by_figure(runs).items()
        if not words.is_detail(key[0], key[1])
    }
    head = ["", "", names[0]]
    for name in names[1:]:
        head += [name, f"/ {names[0]}"]
    rows = [head, *(_row(key, values, names) for key, values in by_figure.items())]
    names_above = _fold_names(rows, columns)
    first_line, *lines = table(rows).splitlines()
    width, height = plan.image_size
    rounds = max((run.round for run in runs), default=0)
    of_rounds = f"of {rounds} rounds, [lowest - highest]" if rounds > 1 else "of one round"
    told = [f"Medians {of_rounds}.", f"{words.LEGEND}.", f"Pictures: {width}x{height}."]
    told.append(f"Seed: {plan.seed}; --seed repeats it, from caches, too.")
    told += ["", first_line] if lines else [""]
    scenario = ""
    for (of, _, _), line, above in zip(by_figure, lines, names_above, strict=True):
        if of != scenario:
            title, good = words.SCENARIOS[of]
            told += ["", f"{of}: {title}", *_wrapped(good, columns)]
            scenario = of
        told += [*above, line]
    return "\n".join([*told, "", *_troubles(names, runs)])


def _wrapped(text: str, columns: int | None) -> list[str]:
    width = 2 + len(text) if columns is None else max(20, columns)
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ")


def _fold_names(rows: list[list[str]], columns: int | None) -> list[list[str]]:
    """Fold the names of figures, so that `rows` with a head fit `columns`: their last lines stay.

    Returns the lines above each.
    """
    longest = max(len(row[0]) for row in rows)
    width = max(map(len, table(rows).splitlines()))
    room = max(_MIN_NAME, longest - max(0, width - (columns or width)))
    folded = [textwrap.wrap(row[0], room, subsequent_indent=" " * 6) for row in rows[1:]]
    for row, lines in zip(rows[1:], folded, strict=True):
        row[0] = lines[-1]
    return [lines[:-1] for lines in folded]


def _row(key: Key, values: dict[str, list[float | None]], names: Sequence[str]) -> list[str]:
    _, name, unit = key
    unit_text = f"{words.better(name, unit)} {_UNITS.get(unit, unit.value)}"
    cells = _cells(key, [values.get(server, []) for server in names])
    return [f"    {words.plain_name(name)}", unit_text.strip(), *cells]


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
            {
                "scenario": scenario,
                "name": name,
                "means": words.plain_name(name),
                "unit": unit,
                "rounds": values,
            }
            for (scenario, name, unit), values in _by_figure(runs).items()
        ],
        "runs": runs,
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=1)


def progress(run: BenchRun, plan: BenchPlan) -> str:
    """The line for a run that has ended."""
    failures = sum(answer.error is not None for answer in run.answers)
    trouble = f", {failures} of {len(run.answers)} requests failed" if failures else ""
    return (
        f"{run_name(run.scenario, run.round, plan)}: {run.server} took {run.seconds:.1f} s{trouble}"
    )


def run_name(scenario: str, round_: int, plan: BenchPlan) -> str:
    """What a run does, in words, which the first round explains."""
    if not round_:
        return scenario
    of_rounds = f"round {round_} of {plan.rounds}, " if plan.rounds > 1 else ""
    title = f" ({words.SCENARIOS[scenario].title})" if round_ == 1 else ""
    return f"{of_rounds}{scenario}{title}"


def _by_figure(runs: Sequence[BenchRun]) -> dict[Key, dict[str, list[float | None]]]:
    """The values of each figure in all rounds, by server."""
    values: dict[Key, dict[str, list[float | None]]] = {}
    for run in runs:
        for figure in run.figures:
            servers = values.setdefault((run.scenario, figure.name, figure.unit), {})
            servers.setdefault(run.server, []).append(figure.value)
    return values


def _cells(key: Key, by_server: Sequence[Sequence[float | None]]) -> list[str]:
    """The cells of each server, and of its ratio to the first one."""
    _, name, unit = key
    first_median = median(by_server[0])
    cells = [_cell(name, unit, by_server[0])]
    for values in by_server[1:]:
        ratio = quotient(median(values), first_median) if unit in _COMPARED else None
        verdict = _verdict(words.better(name, unit), by_server[0], values)
        cells.append(_cell(name, unit, values))
        cells.append(_NOTHING if ratio is None else f"{ratio:.2f}{verdict}")
    return cells


def _verdict(better: str, first: Sequence[float | None], values: Sequence[float | None]) -> str:
    """Whether `values` are better or worse than those of the first server, or within its spread."""
    ours, others = known_values(values), known_values(first)
    if not better or min(len(ours), len(others)) < 2:
        return ""
    if min(ours) <= max(others) and min(others) <= max(ours):
        return " even"
    is_lower = max(ours) < min(others)
    return " better" if is_lower == (better == words.LOWER) else " worse"


def _cell(name: str, unit: Unit, values: Sequence[float | None]) -> str:
    present = known_values(values)
    if not present:
        return _NOTHING
    if unit in _YES_OR_NO:
        good, count = present.count(words.wanted(name)), len(present)
        return {count: "yes", 0: "no"}.get(good, f"yes in {good} of {count}")
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
