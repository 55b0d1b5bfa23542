"""Engines that never get ready are retried a few times, then given up with the reason."""

from __future__ import annotations

import signal

import pytest

from vlm_server.supervisor.engine_process.history import MAX_FAILED_STARTS, FailedStarts


def give_up(status: int | None, *, was_late: bool = False) -> str:
    """The reason that the last of so many gives."""
    starts = FailedStarts(6 << 30)
    for _ in range(MAX_FAILED_STARTS - 1):
        assert starts.record_end(status, was_late=was_late) is None
    reason = starts.record_end(status, was_late=was_late)
    assert reason is not None
    return reason


def test_sigkill_at_start_is_blamed_on_memory() -> None:
    assert "6.00 GiB" in give_up(-signal.SIGKILL)
    assert "memory" in give_up(-signal.SIGKILL)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (-signal.SIGSEGV, "SIGSEGV"),
        (127, "status 127"),
        (None, "not be started"),
        (-99, "signal 99"),
    ],
)
def test_start_failure_names_exit_status(status: int | None, words: str) -> None:
    assert words in give_up(status)


def test_start_timeout_is_not_blamed_on_memory() -> None:
    reason = give_up(-signal.SIGKILL, was_late=True)
    assert "engine.start_timeout_seconds" in reason
    assert "memory" not in reason


def test_engine_that_was_ready_once_is_retried_forever() -> None:
    starts = FailedStarts(6 << 30)
    starts.record_end(1, was_late=False)
    starts.record_ready()
    for _ in range(100):
        assert starts.record_end(-signal.SIGKILL, was_late=False) is None
