"""Checks that fail or hang do not prevent other checks."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from vlm_server.cli.doctor.findings import Check, Finding, ok, output_of
from vlm_server.cli.doctor.situation import Situation, examine


@pytest.fixture
def situation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Situation:
    monkeypatch.setenv("HOME", str(tmp_path))
    import argparse

    return examine(argparse.Namespace(config=None, set=[]))


def test_doctor_runs_checks_after_hang_and_failure(situation: Situation) -> None:
    released = threading.Event()

    def hang(_: Situation) -> list[Finding]:
        released.wait()
        return []

    def fail(_: Situation) -> list[Finding]:
        raise RuntimeError("out of order")

    checks = [
        Check("hangs", hang, 0.2),
        Check("fails", fail),
        Check("works", lambda _: [ok("works", "fine")]),
    ]
    began = time.monotonic()
    found = [finding for check in checks for finding in check.run(situation)]
    released.set()
    assert time.monotonic() - began < 5.0
    assert [finding.level for finding in found] == ["problem", "problem", "ok"]
    assert "RuntimeError: out of order" in found[1].text


def test_output_of_failing_program_is_none() -> None:
    assert output_of(("echo", "hello")) == "hello\n"
    assert output_of(("no-such-program-here",)) is None
    assert output_of(("false",)) is None
    assert output_of(("sleep", "10"), 0.1) is None
