"""The script for a Mac's owner finds no fault here, in all points that need no Mac."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import first_day_on_a_mac

pytestmark = [pytest.mark.e2e, pytest.mark.whole]


def test_first_day_report_has_every_point_and_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    report = tmp_path / "report.md"
    words = ["first_day_on_a_mac", "--without-service", "--out", str(report)]
    monkeypatch.setattr(sys, "argv", words)
    first_day_on_a_mac.main()
    text = report.read_text()
    assert text in capfd.readouterr().out
    assert "WRONG" not in text
    points = first_day_on_a_mac.POINTS[1:]
    assert text.count("\n- ") == len(points)
    assert text.count("needs a Mac") <= 3
