"""The doctor judges the machine and its memory."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from vlm_server.cli.doctor import machine

GIB = 1 << 30


def test_doctor_accepts_this_machine() -> None:
    assert machine.this_machine(platform.system(), platform.machine()).level == "ok"


def test_doctor_reports_python_for_intel_on_mac() -> None:
    found = machine.this_machine("Darwin", "x86_64")
    assert found.level == "problem"
    assert "arm64" in found.advice


@pytest.mark.parametrize(
    ("physical", "allowed", "available", "level"),
    [
        (16 * GIB, 16 * GIB, 8 * GIB, "ok"),
        (16 * GIB, 16 * GIB, None, "ok"),
        (16 * GIB, 4 * GIB, 8 * GIB, "ok"),
        (16 * GIB, 16 * GIB, GIB, "warning"),
        (16 * GIB, GIB // 2, 8 * GIB, "problem"),
    ],
)
def test_doctor_judges_available_and_allowed_memory(
    physical: int, allowed: int, available: int | None, level: str
) -> None:
    found = machine.memory(physical, allowed, available)
    assert found.level == level
    assert ("control group allows" in found.text) == (allowed < physical)


def test_available_memory_is_read_from_meminfo(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2048 kB\n")
    assert machine.available_bytes(tmp_path) == 2 << 20
    assert machine.available_bytes(tmp_path / "elsewhere") is None
