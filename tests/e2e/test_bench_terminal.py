"""`bench` at a terminal: its progress, and a table for people who have never seen it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.daemons import Daemon
from tests.support.terminal import session

pytestmark = pytest.mark.e2e


def test_bench_shows_progress_and_explains_its_table(daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    words = ["--url", f"it={daemon.url}", "--scenarios", "question", "--size", "40x20"]
    with session("bench", *words, "--rounds", "1", "--json", str(file)) as bench:
        bench.wait_for("it: question (one picture")
        assert bench.ended() == 0
    shown = bench.scrolled.splitlines()
    at = shown.index("question: one picture, eight different questions")
    assert shown[at + 1].startswith("  Good: ")
    assert shown[at + 2].startswith("  at each time")
    assert "wait for the first word, the first time" in shown[at + 3]
    assert "lower is better" in bench.scrolled
    assert "it: 10 requests, 0 failed" in shown
    assert not any("100%" in line for line in shown)  # the progress is gone
    assert len(json.loads(file.read_text())["figures"]) == 2
