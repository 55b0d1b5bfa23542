"""SVG drawings of days: each request's TTFT over time, and below it the slowness of each tenth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import msgspec

from vlm_server.cli.bench import day
from vlm_server.cli.bench.day import FIXED_WORK, DaySample
from vlm_server.cli.bench.figures import quotient
from vlm_server.cli.bench.report import BenchRun

_WIDTH = 960
_LEFT, _RIGHT = 70, 170
_TITLE, _GAP, _BOTTOM = 30, 30, 50
_UPPER, _LOWER = 260, 150
_HEIGHT = _TITLE + _UPPER + _GAP + _LOWER + _BOTTOM
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_MACHINE_COLOR = "#cc3311"
_SHOWN_RANGE = (0.8, 1.2)
"""Range of the lower panel; requests beyond are drawn at its border."""
_MAX_STEPS = 10
_DOT = 1.8


def svg(runs: Sequence[BenchRun]) -> str:
    """The drawing of all days among `runs`, one below the other."""
    days = [run for run in runs if run.samples]
    height = max(1, len(days)) * _HEIGHT
    elements: list[str] = []
    for number, run in enumerate(days):
        elements += [f'<g transform="translate(0 {number * _HEIGHT})">', *_day(run), "</g>"]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12">'
    )
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join([head, ground, *elements, "</svg>\n"])


def _day(run: BenchRun) -> Iterator[str]:
    requests = [sample for sample in run.samples if sample.kind != FIXED_WORK]
    title = f"{run.server}, round {run.round}: {len(requests)} requests"
    yield f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(title)}</text>'
    minutes = Axis(0.0, run.seconds / 60, _LEFT, _WIDTH - _RIGHT)
    yield from _times(requests, minutes)
    yield from _levels(run, minutes)


def _times(samples: Sequence[DaySample], minutes: Axis) -> Iterator[str]:
    """Upper panel: a dot for each request, a colour for each group of kinds."""
    milliseconds = [1000 * sample.ttft for sample in samples if sample.ttft]
    low, high = min(milliseconds, default=1.0), max(milliseconds, default=10.0)
    scale = Axis(low / 1.3, high * 1.3, _TITLE + _UPPER, _TITLE, is_logarithmic=True)
    panel = Panel(minutes, scale)
    yield from panel.frame("TTFT, ms", "")
    groups: dict[str, list[str]] = {}
    """Dots by the name of their colour, one for all turns of an agent."""
    for sample in samples:
        dots = groups.setdefault(sample.kind.partition(",")[0], [])
        if sample.ttft:
            dots.append(panel.dot(sample.seconds / 60, 1000 * sample.ttft))
    for number, (name, dots) in enumerate(sorted(groups.items())):
        color = _COLORS[number % len(_COLORS)]
        yield from (f'<g fill="{color}" fill-opacity="0.6">', *dots, "</g>")
        x, y = _WIDTH - _RIGHT + 18, _TITLE + 14 + 18 * number
        yield f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{color}"/>'
        yield f'<text x="{x + 10}" y="{y}">{escape(name)}</text>'


def _levels(run: BenchRun, minutes: Axis) -> Iterator[str]:
    """Lower panel: each request relative to the median of its kind, and each tenth's level."""
    top = _TITLE + _UPPER + _GAP
    low, high = _SHOWN_RANGE
    panel = Panel(minutes, Axis(low, high, top + _LOWER, top))
    yield panel.band(1 - day.MAX_DRIFT, 1 + day.MAX_DRIFT, "#009e73")
    yield from panel.frame("TTFT ÷ its kind's median", "minutes")
    yield '<g fill="#999999" fill-opacity="0.5">'
    kinds = day.kinds(run.samples)
    medians = {kind: day.median_ttft(kind, run.samples) for kind in kinds}
    for sample in run.samples:
        if value := quotient(sample.ttft, medians.get(sample.kind)):
            yield panel.dot(sample.seconds / 60, min(max(value, low), high))
    yield "</g>"
    parts = day.parts(run.samples)
    begins = [min(sample.seconds for sample in part) / 60 for part in parts]
    ends = [*begins[1:], run.seconds / 60]
    for group, color in (([FIXED_WORK], _MACHINE_COLOR), (kinds, "#000000")):
        for begin, end, level in zip(begins, ends, day.levels(run.samples, group), strict=True):
            if level is not None:
                yield panel.line(begin, end, min(max(level, low), high), color)
    notes = ("black: a tenth, median", f"red: {FIXED_WORK}, likewise")
    for number, note in enumerate((*notes, f"green: ± {day.MAX_DRIFT:.0%}")):
        y = top + 14 + 16 * number
        yield f'<text x="{_WIDTH - _RIGHT + 14}" y="{y}">{escape(note)}</text>'


class Axis(msgspec.Struct, frozen=True):
    """A scale from values, `low` to `high`, to pixels, `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    is_logarithmic: bool = False

    def pixel(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_logarithmic:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Round values from `low` to `high`."""
        if self.is_logarithmic:
            return [value for value in _round_values() if self.low <= value <= self.high]
        step = next(step for step in _round_values() if self.high - self.low <= _MAX_STEPS * step)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [step * number for number in range(first, last + 1)]


class Panel(msgspec.Struct, frozen=True):
    """SVG elements of a drawing with two axes."""

    x: Axis
    y: Axis

    def frame(self, y_label: str, x_label: str) -> Iterator[str]:
        """Lines, numbers and names of the axes; an x axis without a name has no numbers."""
        left, right, bottom = self.x.start, self.x.end, self.y.start
        for value in self.y.ticks():
            y = self.y.pixel(value)
            yield f'<path d="M{left} {y}H{right}" stroke="#dddddd"/>'
            yield f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>'
        for value in self.x.ticks() if x_label else ():
            x = self.x.pixel(value)
            yield f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>'
        middle = (self.y.start + self.y.end) / 2
        yield f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        yield f"{escape(y_label)}</text>"
        x = (left + right) / 2
        yield f'<text x="{x}" y="{bottom + 34}" text-anchor="middle">{escape(x_label)}</text>'

    def dot(self, x: float, y: float) -> str:
        return f'<circle cx="{self.x.pixel(x)}" cy="{self.y.pixel(y)}" r="{_DOT}"/>'

    def line(self, begin: float, end: float, y: float, color: str) -> str:
        """Thick line at the height of `y`."""
        path = f"M{self.x.pixel(begin)} {self.y.pixel(y)}H{self.x.pixel(end)}"
        return f'<path d="{path}" stroke="{color}" stroke-width="2.5"/>'

    def band(self, low: float, high: float, color: str) -> str:
        top, height = self.y.pixel(high), self.y.pixel(low) - self.y.pixel(high)
        return (
            f'<rect x="{self.x.start}" y="{top}" width="{self.x.end - self.x.start}" '
            f'height="{height:.1f}" fill="{color}" fill-opacity="0.2"/>'
        )


def _round_values() -> Iterator[float]:
    """1, 2, 5, 10 and so on, from a thousandth to a billion."""
    for power in range(-3, 10):
        for digit in (1, 2, 5):
            yield digit * 10.0**power
