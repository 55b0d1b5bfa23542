"""Silence of an engine with work is overdue; idle time and a stopped front don't count."""

from __future__ import annotations

import pytest

from tests.support.clock import Clock
from vlm_server.protocol import Accepted, MemoryStats, Stats
from vlm_server.supervisor.engine_process.watchdog import INFERENCE, Watchdog

MEMORY = MemoryStats(0, 0, 0, 0, 0, 0, 0, {}, 0.0)


def stats(**at_work: int) -> Stats:
    return Stats({}, 0, {}, MEMORY, 0, at_work=at_work)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watchdog(clock: Clock) -> Watchdog:
    return Watchdog(1.0, clock)


def wait(watchdog: Watchdog, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1.0
        watchdog.tick()


def test_idle_engine_is_never_overdue(watchdog: Watchdog, clock: Clock) -> None:
    wait(watchdog, clock, 1000)
    assert watchdog.overdue_seconds == (0.0, INFERENCE)


def test_more_work_does_not_excuse_silence(watchdog: Watchdog, clock: Clock) -> None:
    for number in range(10):
        watchdog.record_request(f"r{number}")
        wait(watchdog, clock, 1)
    assert watchdog.overdue_seconds == (10.0, INFERENCE)


def test_silence_before_there_was_work_does_not_count(watchdog: Watchdog, clock: Clock) -> None:
    wait(watchdog, clock, 100)
    watchdog.record_request("a")
    wait(watchdog, clock, 2)
    assert watchdog.overdue_seconds == (2.0, INFERENCE)


def test_event_ends_silence(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.record_request("a")
    wait(watchdog, clock, 5)
    watchdog.record_event(Accepted("a"))
    wait(watchdog, clock, 2)
    assert watchdog.overdue_seconds == (2.0, INFERENCE)


def test_end_of_last_request_ends_silence(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.record_request("a")
    watchdog.record_request("b")
    wait(watchdog, clock, 5)
    watchdog.record_end("a")
    assert watchdog.overdue_seconds[0] == 5.0
    watchdog.record_end("b")
    assert watchdog.overdue_seconds[0] == 0.0


def test_unchanged_work_is_overdue_despite_other_events(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.record_request("a")
    for number in range(10):
        watchdog.record_event(stats(encoder=7, preparers=100 + number))
        wait(watchdog, clock, 1)
    assert watchdog.overdue_seconds == (10.0, "encoder")


def test_thread_work_stays_overdue_after_last_request(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.record_request("a")
    watchdog.record_event(stats(preparers=1))
    watchdog.record_end("a")
    wait(watchdog, clock, 3)
    watchdog.record_event(stats(preparers=1))
    wait(watchdog, clock, 3)
    assert watchdog.overdue_seconds == (6.0, "preparers")
    watchdog.record_event(stats())
    assert watchdog.overdue_seconds == (0.0, INFERENCE)


def test_time_while_front_is_stopped_does_not_count(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.record_request("a")
    watchdog.record_event(stats(encoder=1))
    wait(watchdog, clock, 3)
    clock.now += 3600.0
    watchdog.tick()
    assert watchdog.overdue_seconds[0] == 4.0


def test_clock_set_back_does_not_count_as_silence(watchdog: Watchdog, clock: Clock) -> None:
    watchdog.record_request("a")
    wait(watchdog, clock, 3)
    clock.now -= 3600.0
    watchdog.tick()
    assert watchdog.overdue_seconds[0] >= 3.0
