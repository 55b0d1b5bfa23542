"""Compares the end of a day with its beginning, by kind of request.

The machine's own speed, as its fixed work shows it, is compared likewise, and is no part of the
server's figures.
"""

from __future__ import annotations

from collections.abc import Sequence

from vlm_server.cli.bench.figures import (
    Figure,
    Unit,
    known,
    median,
    milliseconds,
    percent,
    quotient,
)
from vlm_server.cli.bench.scenarios.day import FIXED_WORK, Sample

MOST_DRIFT = 0.03
_PARTS = 10


def figures(samples: Sequence[Sample]) -> list[Figure]:
    """The drift and whether it is within `MOST_DRIFT`, then each kind's median and drift."""
    by_part = parts(samples)
    found = levels(samples)
    drift = quotient(found[-1], found[0]) if len(found) > 1 else None
    machine = fixed_work_levels(samples)
    return [
        percent("TTFT, last tenth against the first", drift),
        Figure(f"within {MOST_DRIFT:.0%}", _is_within(drift), Unit.MET),
        percent("slowest tenth against the fastest", _spread(found)),
        milliseconds(FIXED_WORK, _of(FIXED_WORK, samples)),
        percent(f"{FIXED_WORK}: last tenth", _drift_of(FIXED_WORK, by_part)),
        percent(f"{FIXED_WORK}: slowest tenth against the fastest", _spread(machine)),
        *(
            figure
            for kind in _kinds(samples)
            for figure in (
                milliseconds(f"{kind}: TTFT", _of(kind, samples)),
                percent(f"{kind}: last tenth", _drift_of(kind, by_part)),
            )
        ),
    ]


def parts(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The day in ten parts of as many whole rounds each, as nearly as that goes.

    A day of fewer rounds has fewer parts.
    """
    num_rounds = max((sample.round for sample in samples), default=-1) + 1
    num_parts = min(_PARTS, num_rounds)
    found: list[list[Sample]] = [[] for _ in range(num_parts)]
    for sample in samples:
        found[sample.round * num_parts // num_rounds].append(sample)
    return found


def levels(samples: Sequence[Sample]) -> list[float | None]:
    """How slow each part of the day is, 1.0 being usual: the median over the kinds of request of
    the kind's median TTFT in this part, divided by that of the whole day."""
    return _levels(samples, _kinds(samples))


def fixed_work_levels(samples: Sequence[Sample]) -> list[float | None]:
    """The same of the machine by itself."""
    return _levels(samples, [FIXED_WORK])


def relative(samples: Sequence[Sample]) -> list[tuple[Sample, float]]:
    """Each request that has a TTFT, with that TTFT divided by the median of its kind."""
    usual = {kind: _of(kind, samples) for kind in _kinds(samples)}
    asked = (sample for sample in samples if sample.kind in usual)
    found = [(sample, quotient(sample.ttft, usual[sample.kind])) for sample in asked]
    return [(sample, value) for sample, value in found if value is not None]


def _kinds(samples: Sequence[Sample]) -> list[str]:
    """Of requests."""
    return sorted({sample.kind for sample in samples} - {FIXED_WORK})


def _levels(samples: Sequence[Sample], kinds: Sequence[str]) -> list[float | None]:
    usual = {kind: _of(kind, samples) for kind in kinds}
    return [
        median(quotient(_of(kind, part), usual[kind]) for kind in kinds) for part in parts(samples)
    ]


def _of(kind: str, samples: Sequence[Sample]) -> float | None:
    """The median TTFT."""
    return median(sample.ttft for sample in samples if sample.kind == kind)


def _drift_of(kind: str, by_part: Sequence[Sequence[Sample]]) -> float | None:
    if len(by_part) < 2:
        return None
    return quotient(_of(kind, by_part[-1]), _of(kind, by_part[0]))


def _spread(values: Sequence[float | None]) -> float | None:
    """The largest divided by the smallest."""
    seen = known(values)
    return quotient(max(seen), min(seen)) if len(seen) > 1 else None


def _is_within(drift: float | None) -> float | None:
    return None if drift is None else float(abs(drift - 1) <= MOST_DRIFT)
