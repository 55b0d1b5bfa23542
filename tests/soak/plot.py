"""Plots memory over time with matplotlib, a dependency of `dev`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.soak.readings import Reading
from tests.soak.run import Result
from tests.soak.verdict import MB

_INCHES = (10.0, 5.5)
_DOTS_PER_INCH = 120
_LINES: dict[str, tuple[str, Callable[[Reading], int | None]]] = {
    "footprint of the engine": ("#0072b2", lambda reading: reading.engine_footprint_bytes),
    "footprint of the front": ("#56b4e9", lambda reading: reading.front_footprint_bytes),
    "active": ("#d55e00", lambda reading: reading.active_bytes),
    "pool": ("#e69f00", lambda reading: reading.pool_bytes),
}


def draw(result: Result, file: Path) -> None:
    """Write a PNG: memory in MB on the left axis, requests that ended on the right."""
    figure = Figure(figsize=_INCHES, dpi=_DOTS_PER_INCH, layout="constrained")
    memory = figure.subplots()
    _memory(memory, result)
    _requests(memory.twinx(), result)
    figure.legend(loc="outside upper center", ncols=len(_LINES) + 2, frameon=False)
    figure.savefig(file)


def _memory(axes: Axes, result: Result) -> None:
    minutes = [reading.seconds / 60 for reading in result.readings]
    for name, (color, size) in _LINES.items():
        sizes = [_megabytes(size(reading)) for reading in result.readings]
        axes.plot(minutes, sizes, color=color, label=name, linewidth=1.4)
    for number, rest in enumerate(filter(None, result.rests)):
        label = None if number else "at rest"
        axes.axvline(rest.seconds / 60, color="#555555", linestyle=":", linewidth=1, label=label)
    axes.set(xlabel="minutes", ylabel="MB", ylim=(0, None), xlim=(0, None))
    axes.grid(axis="y", alpha=0.25)


def _requests(axes: Axes, result: Result) -> None:
    minutes = [reading.seconds / 60 for reading in result.readings]
    counts = [reading.requests for reading in result.readings]
    axes.plot(minutes, counts, color="#999999", linestyle="--", label="requests (right)")
    axes.set(ylabel="requests that ended", ylim=(0, None))


def _megabytes(size: int | None) -> float:
    return float("nan") if size is None else size / MB
