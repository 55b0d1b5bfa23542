"""Made-up results of soaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.soak.readings import Reading
from tests.soak.request import Ending, Kind, Outcome
from tests.soak.run import Plan, Result

MB = 10**6


def reading(requests: int = 0, **changes: Any) -> Reading:
    values = {
        "seconds": requests / 5,
        "requests": requests,
        "users": 4,
        "active_bytes": 60 * MB,
        "pool_bytes": 200 * MB,
        "peak_bytes": 90 * MB,
        "caches": {"encoder": 4 * MB, "prefix": 20 * MB, "pixel": 16 * MB},
        "engine_footprint_bytes": 500 * MB,
        "front_footprint_bytes": 60 * MB,
        "tracked": 0,
        "in_flight": 0,
        "restarts": 0,
    }
    return Reading(**values | changes)


def answered(ttft: float | None = 0.1) -> Outcome:
    return Outcome(kind=Kind.NEW_IMAGE, ending=Ending.ANSWERED, status=200, ttft=ttft)


FAILURE = Outcome(kind=Kind.JSON, ending=Ending.FAILED, status=500, error="it broke")
LEAVER = Outcome(kind=Kind.SHORT_TEXT, ending=Ending.LEFT)


def result(
    outcomes: Sequence[Outcome] = (answered(),),
    readings: Sequence[Reading] = (),
    start: Reading | None = reading(),  # noqa: B008  frozen
    end: Reading | None = reading(500),  # noqa: B008
    between: Sequence[Reading | None] = (),
) -> Result:
    return Result(Plan(2, 7, 16), list(outcomes), list(readings), [start, *between, end], 0)


def growing(megabytes_per_thousand: float, most: int = 3000) -> list[Reading]:
    """Readings of a footprint that jumps at first, and then grows steadily."""
    return [
        reading(
            count,
            engine_footprint_bytes=(
                count * MB
                if count < 1000
                else round((1000 + megabytes_per_thousand * count / 1000) * MB)
            ),
        )
        for count in range(0, most, 50)
    ]
