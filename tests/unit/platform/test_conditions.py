"""Why work that can wait should wait, read from fake folders and stand-ins for macOS."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest

from vlm_server.platform import conditions
from vlm_server.platform.conditions import strain

CALM = "some avg10=0.00 avg60=40.00 avg300=0.00 total=5\nfull avg10=0.00 avg60=0.00\n"


def write(root: Path, **files: str) -> Path:
    """A root folder with the files of a laptop on mains, cool and calm, and these."""
    texts = {
        "sys/class/power_supply/AC/online": "1",
        "sys/class/power_supply/AC/type": "Mains",
        "sys/class/power_supply/BAT0/type": "Battery",
        "sys/class/power_supply/BAT0/status": "Discharging",
        "sys/class/thermal/thermal_zone0/temp": "61000",
        "sys/class/thermal/thermal_zone0/trip_point_0_type": "passive",
        "sys/class/thermal/thermal_zone0/trip_point_0_temp": "60000",
        "sys/class/thermal/thermal_zone0/trip_point_1_type": "critical",
        "sys/class/thermal/thermal_zone0/trip_point_1_temp": "100000",
        "proc/pressure/memory": CALM,
        **{name.replace("__", "/"): text for name, text in files.items()},
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def test_calm_machine_has_no_strain(tmp_path: Path) -> None:
    assert strain(write(tmp_path)) is None
    assert strain(tmp_path / "nothing") is None


def test_battery_alone_is_reported_unless_it_is_allowed(tmp_path: Path) -> None:
    root = write(tmp_path, sys__class__power_supply__AC__online="0")
    assert strain(root) == "on_battery"
    assert strain(root, on_battery=True) is None


def test_battery_of_mouse_is_not_that_of_machine(tmp_path: Path) -> None:
    (root := write(tmp_path, sys__class__power_supply__AC__online="0")).joinpath(
        "sys/class/power_supply/BAT0/scope"
    ).write_text("Device\n")
    assert strain(root) is None


@pytest.mark.parametrize(("millidegrees", "is_hot"), [("89999", False), ("90000", True)])
def test_heat_is_reported_near_critical_temperature(
    tmp_path: Path, millidegrees: str, is_hot: bool
) -> None:
    root = write(tmp_path, sys__class__thermal__thermal_zone0__temp=millidegrees)
    assert strain(root) == ("heat" if is_hot else None)


@pytest.mark.parametrize("text", ["some avg10=10.01 avg60=0.00", "some avg10=99.00"])
def test_memory_pressure_is_reported(tmp_path: Path, text: str) -> None:
    assert strain(write(tmp_path, proc__pressure__memory=text)) == "memory_pressure"


@pytest.mark.parametrize("text", ["", "some", "some avg10=x", "full avg10=50.0", "\x00"])
def test_odd_pressure_file_is_no_pressure(tmp_path: Path, text: str) -> None:
    assert strain(write(tmp_path, proc__pressure__memory=text)) is None


# ---- macOS -----------------------------------------------------------------------------


class _System:
    """notify(3) of macOS, with a thermal pressure level, and its sysctl."""

    def __init__(self, level: int, pressure: int) -> None:
        self.level, self.pressure = level, pressure

    def notify_register_check(self, name: bytes, _token: Any) -> int:
        return 0 if name == b"com.apple.system.thermalpressurelevel" else 1

    def notify_get_state(self, _token: Any, state: Any) -> int:
        state._obj.value = self.level
        return 0

    def notify_cancel(self, _token: Any) -> int:
        return 0

    def sysctlbyname(self, _name: bytes, level: Any, *_: Any) -> int:
        level._obj.value = self.pressure
        return 0


@pytest.mark.parametrize(
    ("supply", "level", "pressure", "expected"),
    [
        ("AC Power", 0, 1, None),
        ("AC Power", 1, 1, None),
        ("Battery Power", 0, 1, "on_battery"),
        ("AC Power", 2, 1, "heat"),
        ("AC Power", 0, 2, "memory_pressure"),
    ],
)
def test_mac_is_asked_by_its_own_means(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    supply: str,
    level: int,
    pressure: int,
    expected: str | None,
) -> None:
    program = tmp_path / "pmset"
    program.write_text(
        f"#!/bin/sh\n[ \"$*\" = '-g batt' ] && echo \"Now drawing from '{supply}'\"\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(conditions, "_PMSET", str(program))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: _System(level, pressure))
    assert strain(tmp_path) == expected


def test_mac_without_pmset_and_notifications_has_no_strain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "_PMSET", "/nowhere/pmset")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert strain(tmp_path) is None
