"""The kernel is told to end the engine rather than the front."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vlm_server.platform.footprint import be_killed_first

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")


@pytest.mark.parametrize(("before", "after"), [("0", "500"), ("-200", "500"), ("800", "800")])
def test_oom_score_is_raised_and_never_lowered(tmp_path: Path, before: str, after: str) -> None:
    score = tmp_path / "oom_score_adj"
    score.write_text(before + "\n")
    be_killed_first(score)
    assert score.read_text().strip() == after


def test_unwritable_oom_score_is_ignored(tmp_path: Path) -> None:
    be_killed_first(tmp_path / "absent")
