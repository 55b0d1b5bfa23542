"""Memory over the last hour, and why engines ended."""

from __future__ import annotations

import pytest

from tests.support.clock import Clock
from vlm_server.protocol import MemoryStats
from vlm_server.supervisor.engine_process.history import (
    HISTORY_SECONDS,
    SAMPLE_SECONDS,
    MemoryHistory,
    MemorySample,
    reason_of_end,
)


def reading(active: int, pool: int = 0, footprint: int = 0) -> MemoryStats:
    return MemoryStats(active, pool, 0, 0, 0, footprint, 0, {}, 0.0)


def test_memory_sample_is_maximum_of_its_interval() -> None:
    clock = Clock(10_000.0)
    history = MemoryHistory(clock)
    history.add(reading(5, 9, 1), 10)
    clock.now += SAMPLE_SECONDS - 1
    history.add(reading(7, 2, 3), 30)
    clock.now += 1
    history.add(reading(1), 40)
    samples = [
        MemorySample(10_000, 7, 9, 3, 30),
        MemorySample(10_000 + SAMPLE_SECONDS, 1, 0, 0, 40),
    ]
    assert list(history.samples) == samples


def test_memory_history_keeps_one_hour_and_last_sample() -> None:
    clock = Clock(10_000.0)
    history = MemoryHistory(clock)
    for i in range(3 * HISTORY_SECONDS // SAMPLE_SECONDS):
        clock.now = 10_000 + i * SAMPLE_SECONDS
        history.add(reading(i), i)
    assert len(history.samples) == HISTORY_SECONDS // SAMPLE_SECONDS
    last = history.samples[-1]
    clock.now += 2 * HISTORY_SECONDS  # idle: nothing is told, and memory is as it was
    assert list(history.samples) == [last]


@pytest.mark.parametrize(
    ("status", "hung", "reason"),
    [
        (-9, None, "was ended by SIGKILL, as systems do without memory"),
        (-11, None, "was ended by SIGSEGV"),
        (1, None, "ended with status 1"),
        (None, None, "could not be started"),
        (-9, "encoder", "made no progress (encoder) and was ended"),
    ],
)
def test_engine_end_reasons_are_described(
    status: int | None, hung: str | None, reason: str
) -> None:
    assert reason_of_end(status, hung) == reason
