"""Figures of several seeds, and what a study says of each point that it looked at."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from scripts.simulation.summary import Summary


class Spread(msgspec.Struct, frozen=True):
    """Of several seeds."""

    median: float
    least: float
    most: float


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """`at`: users, workers, or seconds. Times are in seconds, rates in a second."""

    at: float
    ttft_p50: Spread
    ttft_p99: Spread
    hit_rate: Spread
    request_rate: Spread
    utilisation: Spread


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """knee: the most users before TTFT p99 is several times one user's. flat: before its median
    rises. 0 if they were not looked for."""

    points: list[Point]
    knee: int = 0
    flat: int = 0


def spread(values: Sequence[float]) -> Spread:
    """To a ten-thousandth."""
    found = statistics.median(values), min(values), max(values)
    return Spread(*(round(value, 4) for value in found))


def point(at: float, found: Sequence[tuple[Summary, float]]) -> Point:
    """Of the summaries and utilisations of all seeds."""
    summaries = [summary for summary, _ in found]
    return Point(
        at=at,
        ttft_p50=spread([one.ttft_p50 for one in summaries]),
        ttft_p99=spread([one.ttft_p99 for one in summaries]),
        hit_rate=spread([one.hit_rate for one in summaries]),
        request_rate=spread([one.request_rate for one in summaries]),
        utilisation=spread([utilisation for _, utilisation in found]),
    )


def knee(points: Sequence[Point], values: Sequence[Spread], times: float) -> int:
    """Where the last point is before a value is more than `times` the first one."""
    within = 0
    for each, value in zip(points, values, strict=True):
        if value.median > times * values[0].median:
            break
        within = int(each.at)
    return within
