"""The deadlines of a request, by a clock that only the test moves."""

from __future__ import annotations

import math

import pytest

from vlm_server.deadlines import RequestDeadlines
from vlm_server.protocol import Deadlines

ALL = Deadlines(
    queue_timeout_seconds=1,
    first_token_timeout_seconds=2,
    token_timeout_seconds=0.5,
    total_timeout_seconds=4,
)


def code(deadlines: RequestDeadlines, now: float) -> str | None:
    error = deadlines.error_at(now)
    return error.code if error else None


def test_request_without_limits_never_expires() -> None:
    deadlines = RequestDeadlines(Deadlines(), 5.0)
    deadlines.begin()
    deadlines.record_token(6.0)
    assert deadlines.next_at == math.inf
    assert code(deadlines, 1e12) is None
    assert deadlines.remaining(1e12) == Deadlines()


def test_every_deadline_expires_in_time_with_its_code() -> None:
    deadlines = RequestDeadlines(ALL, 10.0)
    assert [code(deadlines, now) for now in (10.0, 10.99, 11.0)] == [None, None, "queue_timeout"]
    deadlines.begin()
    assert [code(deadlines, now) for now in (11.99, 12.0)] == [None, "first_token_timeout"]
    deadlines.record_token(11.9)
    assert [code(deadlines, now) for now in (12.39, 12.4)] == [None, "token_timeout"]
    deadlines.record_token(13.8)
    assert [code(deadlines, now) for now in (13.99, 14.0, 99.0)] == [None] + ["total_timeout"] * 2


def test_earliest_missed_deadline_is_named() -> None:
    assert code(RequestDeadlines(ALL, 0.0), 99.0) == "queue_timeout"


def test_first_token_also_ends_queue_deadline() -> None:
    deadlines = RequestDeadlines(ALL, 0.0)
    deadlines.record_token(0.9)
    assert deadlines.next_at == pytest.approx(1.4)


def test_remaining_seconds_are_handed_on_as_deadlines() -> None:
    deadlines = RequestDeadlines(ALL, 10.0)
    assert deadlines.remaining(10.5) == Deadlines(0.5, 1.5, 0.5, 3.5)
    assert deadlines.remaining(13.0) == Deadlines(0.0, 0.0, 0.5, 1.0), "never below zero"
