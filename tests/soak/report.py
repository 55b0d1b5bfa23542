"""Renders a soak's result as Markdown and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from tests.soak.readings import Reading
from tests.soak.request import Ending, Kind, Outcome
from tests.soak.run import Result
from tests.soak.verdict import MB, Criterion, is_passed
from vlm_server.cli.bench.figures import known_values, median, percentile

_VERDICTS = {True: "met", False: "**missed**", None: "not judged"}
_SIZES: dict[str, Callable[[Reading], int | None]] = {
    "active": lambda reading: reading.active_bytes,
    "active, but for the caches": lambda reading: reading.active_bytes - _cached_bytes(reading),
    "pool": lambda reading: reading.pool_bytes,
    "most ever active": lambda reading: reading.peak_bytes,
    "footprint of the engine": lambda reading: reading.engine_footprint_bytes,
    "footprint of the front": lambda reading: reading.front_footprint_bytes,
    "footprint of both": lambda reading: reading.footprint_bytes,
}
_DEVICE_CACHES = ("encoder", "tile", "prefix")


def markdown(result: Result, criteria: Sequence[Criterion]) -> str:
    """The report for people."""
    plan = result.plan
    rows = [(c.name, c.bound, c.value, _VERDICTS[c.is_met]) for c in criteria]
    return "\n".join(
        [
            f"# Soak: {'passed' if is_passed(criteria) else 'FAILED'}",
            "",
            f"{plan.minutes:g} minutes, 1 to {plan.users} users, seed {plan.seed}: "
            f"{len(result.outcomes)} requests, {result.waits} waits for a queue slot.",
            "",
            *_table(("criterion", "bound", "found", ""), rows),
            "",
            *_table(("memory, MB", "start", "peak", "end"), _memory(result)),
            "",
            *_table(("requests", *_ENDING_NAMES, *_TTFT_NAMES), _requests(result.outcomes)),
            "",
            f"Statuses: {_statuses(result.outcomes)}.",
            *_failures(result.outcomes),
            "",
        ]
    )


def document(result: Result, criteria: Sequence[Criterion]) -> bytes:
    """The JSON report: all readings and failures, and the number of outcomes of each kind."""
    counts: Counter[tuple[str, str]] = Counter(
        (outcome.kind.value, outcome.ending.value) for outcome in result.outcomes
    )
    content: dict[str, Any] = {
        "plan": result.plan,
        "passed": is_passed(criteria),
        "criteria": criteria,
        "requests": [
            {"kind": kind, "ending": ending, "count": count}
            for (kind, ending), count in counts.items()
        ],
        "failures": [outcome for outcome in result.outcomes if outcome.error is not None],
        "rests": result.rests,
        "readings": result.readings,
    }
    return msgspec.json.format(msgspec.json.encode(content))


_ENDING_NAMES = tuple(ending.value for ending in Ending)
_TTFT_NAMES = ("TTFT, median, ms", "99th percentile")


def _requests(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    rows = [
        (kind.value, *_counts(of_kind))
        for kind in Kind
        if (of_kind := [outcome for outcome in outcomes if outcome.kind is kind])
    ]
    return [*rows, ("all", *_counts(outcomes))]


def _counts(outcomes: Sequence[Outcome]) -> list[str]:
    endings = Counter(outcome.ending for outcome in outcomes)
    ttfts = known_values(outcome.ttft for outcome in outcomes)
    times = (median(ttfts), percentile(ttfts, 99))
    return [
        *(str(endings[ending]) for ending in Ending),
        *("" if time is None else f"{1000 * time:.0f}" for time in times),
    ]


def _memory(result: Result) -> list[tuple[str, ...]]:
    return [
        (
            name,
            _megabytes(None if result.start is None else size(result.start)),
            _megabytes(max(known_values(map(size, result.readings)), default=None)),
            _megabytes(None if result.end is None else size(result.end)),
        )
        for name, size in _SIZES.items()
    ]


def _cached_bytes(reading: Reading) -> int:
    return sum(reading.caches.get(name, 0) for name in _DEVICE_CACHES)


def _megabytes(size: float | None) -> str:
    return "" if size is None else f"{size / MB:.1f}"


def _statuses(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(outcome.status for outcome in outcomes)
    return ", ".join(
        f"{count} × {'none' if status is None else status}"  # noqa: RUF001
        for status, count in counts.most_common()
    )


def _failures(outcomes: Sequence[Outcome]) -> list[str]:
    """Each different failure with its count."""
    counts = Counter(
        (outcome.kind.value, outcome.status, outcome.error)
        for outcome in outcomes
        if outcome.error is not None
    )
    return [
        line
        for (kind, status, error), count in counts.most_common()
        for line in ("", f"- {count} × {kind}, status {status}: {error}")  # noqa: RUF001
    ]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
