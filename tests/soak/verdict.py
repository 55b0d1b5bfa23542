"""The criteria of a soak and their thresholds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from tests.soak.readings import Reading
from tests.soak.request import Ending
from tests.soak.run import Result

MB = 10**6
MOST_ACTIVE_CHANGE = 0.01
MOST_SLOPE = 1.0
"""MB of footprint per 1,000 requests."""
SETTLING_REQUESTS = 1000
"""The footprint before this many requests is not judged."""
SLOPE_REQUESTS = 2000
"""With fewer requests, the footprint is not judged at all."""


class Criterion(msgspec.Struct, frozen=True):
    """`is_met` is None if there is nothing to judge."""

    name: str
    bound: str
    value: str
    is_met: bool | None


def judge(result: Result) -> list[Criterion]:
    return [
        _failures(result),
        _orphans(result.end),
        _restarts(result.end),
        _active(result.start, result.end),
        _footprint(result),
    ]


def is_passed(criteria: Sequence[Criterion]) -> bool:
    return all(criterion.is_met is not False for criterion in criteria)


def slope(rests: Sequence[Reading | None]) -> float | None:
    """MB of footprint (both processes) per 1,000 requests, by least squares.

    Over the rests after the first `SETTLING_REQUESTS`; None if there are too few.
    """
    points = [
        (rest.requests, rest.footprint_bytes)
        for rest in rests
        if rest is not None
        and rest.requests >= SETTLING_REQUESTS
        and rest.footprint_bytes is not None
    ]
    if len({requests for requests, _ in points}) < 2:
        return None
    requests, sizes = zip(*points, strict=True)
    return statistics.linear_regression(requests, sizes).slope * 1000 / MB


def active_change(start: Reading, end: Reading) -> float:
    """The growth of device memory in use from start to end, as a share of the start."""
    return end.active_bytes / start.active_bytes - 1


def _failures(result: Result) -> Criterion:
    count = sum(outcome.ending is Ending.FAILED for outcome in result.outcomes)
    value = f"{count} of {len(result.outcomes)}"
    return Criterion("failures", "0", value, bool(result.outcomes) and not count)


def _orphans(end: Reading | None) -> Criterion:
    name, bound = "orphans at the end", "0 tracked, 0 queue slots"
    if end is None:
        return Criterion(name, bound, "no reading", False)
    value = f"{end.tracked} tracked, {end.in_flight} queue slots"
    return Criterion(name, bound, value, not (end.tracked or end.in_flight))


def _restarts(end: Reading | None) -> Criterion:
    if end is None:
        return Criterion("engine restarts", "0", "no reading", False)
    return Criterion("engine restarts", "0", str(end.restarts), not end.restarts)


def _active(start: Reading | None, end: Reading | None) -> Criterion:
    name, bound = "active memory, end to start", f"± {MOST_ACTIVE_CHANGE:.0%}"
    if start is None or end is None:
        return Criterion(name, bound, "no reading", False)
    change = active_change(start, end)
    return Criterion(name, bound, f"{change:+.2%}", abs(change) <= MOST_ACTIVE_CHANGE)


def _footprint(result: Result) -> Criterion:
    name = f"footprint after {SETTLING_REQUESTS:,} requests, MB per 1,000"
    found = slope(result.rests)
    value = "none" if found is None else f"{found:+.2f}"
    is_met = None
    if len(result.outcomes) >= SLOPE_REQUESTS:
        is_met = found is not None and found <= MOST_SLOPE
    return Criterion(name, f"≤ {MOST_SLOPE:g}", value, is_met)
