"""Axes and panels of an SVG drawing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

import msgspec

_MOST_STEPS = 10
_DOT = 1.8


class Axis(msgspec.Struct, frozen=True):
    """From values, `least` to `most`, to pixels, `start` to `end`."""

    least: float
    most: float
    start: float
    end: float
    is_logarithmic: bool = False

    def pixel(self, value: float) -> float:
        least, most = self.least, self.most
        if self.is_logarithmic:
            value, least, most = math.log(value), math.log(least), math.log(most)
        return round(self.start + (value - least) / (most - least) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """Round values from `least` to `most`."""
        if self.is_logarithmic:
            return [value for value in _round_values() if self.least <= value <= self.most]
        step = next(
            step for step in _round_values() if self.most - self.least <= _MOST_STEPS * step
        )
        first, last = math.ceil(self.least / step - 1e-9), math.floor(self.most / step + 1e-9)
        return [step * number for number in range(first, last + 1)]


class Panel(msgspec.Struct, frozen=True):
    """The SVG elements of a drawing with two axes."""

    x: Axis
    y: Axis

    def frame(self, y_label: str, x_label: str) -> Iterator[str]:
        """Lines, numbers and names of the axes; numbers below only with a name."""
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
        """A thick one, level with `y`."""
        path = f"M{self.x.pixel(begin)} {self.y.pixel(y)}H{self.x.pixel(end)}"
        return f'<path d="{path}" stroke="{color}" stroke-width="2.5"/>'

    def band(self, least: float, most: float, color: str) -> str:
        top, height = self.y.pixel(most), self.y.pixel(least) - self.y.pixel(most)
        return (
            f'<rect x="{self.x.start}" y="{top}" width="{self.x.end - self.x.start}" '
            f'height="{height:.1f}" fill="{color}" fill-opacity="0.2"/>'
        )


def _round_values() -> Iterator[float]:
    """1, 2, 5, 10 and so on, from a thousandth to a billion."""
    for power in range(-3, 10):
        for digit in (1, 2, 5):
            yield digit * 10.0**power
