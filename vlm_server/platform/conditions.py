"""The machine's conditions for work that can wait: its power, its heat, its memory."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Literal

from vlm_server.platform import machine

Strain = Literal["on_battery", "heat", "memory_pressure"]

_ROOT = Path("/")
_PMSET = "/usr/bin/pmset"
_PMSET_SECONDS = 5.0
_MARGIN_MILLIDEGREES = 10_000
"""How far below the temperature at which the system would act a machine is hot."""
_MAX_STALLED_PERCENT = 10.0
"""The part of the last ten seconds in which some task waited for memory."""
_THERMAL_LEVEL = b"com.apple.system.thermalpressurelevel"
"""Of notify(3), see OSThermalNotification.h: 0 nominal, 1 moderate, 2 heavy, and more."""
_HEAVY = 2


def strain(root: Path | None = None, *, on_battery: bool = False) -> Strain | None:
    """Why work that can wait should wait; None if it need not, or nothing can be read.

    `root` is the folder that has `proc` and `sys`, by default `/`; `on_battery` says that it may
    run on battery. It may take a moment: call it from a thread.
    """
    root = _ROOT if root is None else root
    is_mac = sys.platform == "darwin"
    if not on_battery and (_mac_is_on_battery() if is_mac else _is_on_battery(root)):
        return "on_battery"
    if _mac_is_hot() if is_mac else _is_hot(root):
        return "heat"
    if machine.memory_pressure() != machine.NO_PRESSURE or _is_stalled(root):
        return "memory_pressure"
    return None


def _is_on_battery(root: Path) -> bool:
    """Whether a battery of the machine, not of a mouse, supplies it, and nothing else does."""
    supplies = list((root / "sys/class/power_supply").glob("*"))
    if any(_text(supply / "online") == "1" for supply in supplies):
        return False
    return any(
        _text(supply / "type") == "Battery"
        and _text(supply / "scope") != "Device"
        and _text(supply / "status") == "Discharging"
        for supply in supplies
    )


def _is_hot(root: Path) -> bool:
    """Whether a zone is within 10 degrees of its `hot` or `critical` trip point."""
    for zone in (root / "sys/class/thermal").glob("thermal_zone*"):
        temperature = _number(zone / "temp")
        for kind in zone.glob("trip_point_*_type"):
            trip = _number(kind.with_name(kind.name.replace("_type", "_temp")))
            is_limit = _text(kind) in ("hot", "critical") and trip > 0
            if is_limit and temperature >= trip - _MARGIN_MILLIDEGREES:
                return True
    return False


def _is_stalled(root: Path) -> bool:
    """Whether tasks wait for memory, by the kernel's pressure stall information."""
    words = _text(root / "proc/pressure/memory").split()
    if len(words) < 2 or words[0] != "some" or not words[1].startswith("avg10="):
        return False
    try:
        return float(words[1].removeprefix("avg10=")) > _MAX_STALLED_PERCENT
    except ValueError:
        return False


def _mac_is_on_battery() -> bool:
    try:
        answer = subprocess.run(
            [_PMSET, "-g", "batt"], capture_output=True, timeout=_PMSET_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return b"'Battery Power'" in answer.stdout


def _mac_is_hot() -> bool:
    """Whether macOS reports heavy thermal pressure, at which it slows the machine down."""
    token, level = ctypes.c_int(), ctypes.c_uint64()
    try:
        system = ctypes.CDLL(None)
        if system.notify_register_check(_THERMAL_LEVEL, ctypes.byref(token)):
            return False
        status = system.notify_get_state(token, ctypes.byref(level))
        system.notify_cancel(token)
    except AttributeError:  # not on macOS
        return False
    return not status and level.value >= _HEAVY


def _text(path: Path) -> str:
    """The text of a file; empty if there is none that can be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.removeprefix("-").isdecimal() else 0
