"""The doctor judges chip, system and memory of the machine."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from vlm_server.cli.doctor import machine

GIB = 1 << 30


def test_doctor_accepts_chip_and_system_of_this_machine() -> None:
    levels = {
        machine.chip(platform.system(), platform.machine()).level,
        machine.system(platform.system(), platform.mac_ver()[0]).level,
    }
    assert levels == {"ok"}


@pytest.mark.parametrize(
    ("system", "architecture", "advice"),
    [("Darwin", "x86_64", "Apple silicon"), ("Linux", "armv7l", "aarch64")],
)
def test_doctor_reports_chip_without_mlx_package(
    system: str, architecture: str, advice: str
) -> None:
    found = machine.chip(system, architecture)
    assert found.level == "problem"
    assert advice in found.advice


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


def test_doctor_reports_old_macos() -> None:
    assert machine.system("Darwin", "13.6").level == "problem"


@pytest.mark.parametrize(("sw_vers_output", "version"), [("26.1\n", "26.1"), (None, "16.0")])
def test_doctor_prefers_macos_version_of_sw_vers(
    monkeypatch: pytest.MonkeyPatch, sw_vers_output: str | None, version: str
) -> None:
    """A Python built for an older macOS reports version 26 as 16."""
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("16.0", ("", "", ""), "arm64"))
    monkeypatch.setattr(
        machine, "output_of", lambda words: sw_vers_output if words[0] == "sw_vers" else None
    )
    assert (
        f"macOS {version}"
        in {finding.check: finding.text for finding in machine.look_at_machine(None)}["system"]
    )
