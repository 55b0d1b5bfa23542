"""A soak's report, document, plot and exit status show its result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.soak import command, plot, report
from tests.soak.verdict import judge
from tests.unit.soak.results import FAILURE, LEAVER, MB, answered, growing, reading, result


def row(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_passed_soak_report_shows_figures():
    soak_result = result([answered(0.1), answered(0.3), answered(0.2), LEAVER], growing(0))
    text = report.markdown(soak_result, judge(soak_result))
    assert text.startswith("# Soak: passed\n")
    assert "seed 7: 4 requests" in text
    assert row(text, "new picture") == ["3", "0", "0", "0", "200", "300"]
    assert row(text, "short text") == ["0", "0", "1", "0", "", ""]
    assert row(text, "active, but for the caches") == ["36.0", "36.0", "36.0"]
    assert row(text, "footprint of both") == ["560.0", "1060.0", "560.0"]
    assert "Statuses: 3 × 200, 1 × none." in text  # noqa: RUF001
    assert "**missed**" not in text


def test_failed_soak_report_counts_failures():
    soak_result = result([answered(), FAILURE, FAILURE], [reading()])
    text = report.markdown(soak_result, judge(soak_result))
    assert text.startswith("# Soak: FAILED\n")
    assert row(text, "failures") == ["0", "2 of 3", "**missed**"]
    assert "- 2 × JSON by schema, status 500: it broke" in text  # noqa: RUF001


def test_soak_report_of_dead_daemon_leaves_end_blank():
    soak_result = result([FAILURE], [reading()], end=None)
    assert row(report.markdown(soak_result, judge(soak_result)), "pool") == ["200.0", "200.0", ""]


def test_soak_document_holds_plan_failures_and_readings():
    soak_result = result([answered(), FAILURE], growing(1))
    content = json.loads(report.document(soak_result, judge(soak_result)))
    assert content["passed"] is False
    assert content["plan"] == {"minutes": 2, "seed": 7, "users": 16}
    assert {"kind": "new picture", "ending": "answered", "count": 1} in content["requests"]
    assert [failure["error"] for failure in content["failures"]] == ["it broke"]
    assert len(content["readings"]) == 60


@pytest.mark.parametrize(("active", "status"), [(60 * MB, 0), (70 * MB, 1)])
def test_soak_writes_reports_and_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], active: int, status: int
):
    soak_result = result(readings=growing(1), end=reading(active_bytes=active))
    assert command.conclude(soak_result, tmp_path) == status
    assert (tmp_path / "report.md").read_text() == capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["passed"] is (status == 0)
    with Image.open(tmp_path / "memory.png") as image:
        assert image.size[0] > 1000


def test_memory_plot_is_drawn_without_footprints(tmp_path: Path):
    silent = [reading(count, front_footprint_bytes=None) for count in (0, 10)]
    plot.draw(result(readings=silent, end=None), tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 10_000
