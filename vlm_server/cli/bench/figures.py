"""Figures computed from many answers: medians, percentiles, throughput."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec


class Unit(Enum):
    """The unit of a figure, as it is printed."""

    MILLISECONDS = "ms"
    PERCENT = "%"
    TOKENS = "tokens"
    TOKENS_PER_SECOND = "tokens/s"
    RATIO = "x"
    COUNT = ""
    EQUAL = "equal"
    """1.0 where the texts were equal, 0.0 where they were not."""
    MET = "met"
    """1.0 where a target was met, 0.0 where it was missed."""


class Figure(msgspec.Struct, frozen=True):
    """One measured value; None if it can't be computed from the answers."""

    name: str
    value: float | None
    unit: Unit


def known_values(values: Iterable[float | None]) -> list[float]:
    """The values that are not None."""
    return [value for value in values if value is not None]


def median(values: Iterable[float | None]) -> float | None:
    """The median of the values that are not None; None if there are none."""
    present = known_values(values)
    return statistics.median(present) if present else None


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of all values; None if there are none, or one is unknown."""
    present = known_values(values)
    return statistics.fmean(present) if present and len(present) == len(values) else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that `percent` of all do not exceed (nearest rank); None if empty."""
    if not values:
        return None
    rank = max(1, math.ceil(percent / 100 * len(values)))
    return sorted(values)[rank - 1]


def largest(values: Iterable[float | None]) -> float | None:
    return max(known_values(values), default=None)


def quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def increase(before: int | None, after: int | None) -> float | None:
    """The increase of a counter; None if one reading is unknown."""
    return None if before is None or after is None else float(after - before)


def milliseconds(name: str, seconds: float | None) -> Figure:
    return Figure(name, None if seconds is None else 1000 * seconds, Unit.MILLISECONDS)


def percent(name: str, ratio: float | None) -> Figure:
    """The excess of `ratio` over 1, in percent."""
    return Figure(name, None if ratio is None else 100 * (ratio - 1), Unit.PERCENT)


def ratio(name: str, above: float | None, below: float | None) -> Figure:
    return Figure(name, quotient(above, below), Unit.RATIO)


def throughput(name: str, tokens: Sequence[int | None], seconds: float) -> Figure:
    """The sum of `tokens` over `seconds`; unknown if one count is unknown."""
    token_counts = known_values(tokens)
    total = sum(token_counts) if token_counts and len(token_counts) == len(tokens) else None
    return Figure(name, quotient(total, seconds), Unit.TOKENS_PER_SECOND)


def equality(name: str, pairs: Iterable[tuple[str | None, str | None]]) -> Figure:
    """Whether the texts of each pair are equal; unknown if one is missing."""
    compared = list(pairs)
    if any(text is None for pair in compared for text in pair):
        return Figure(name, None, Unit.EQUAL)
    return Figure(name, float(all(left == right for left, right in compared)), Unit.EQUAL)
