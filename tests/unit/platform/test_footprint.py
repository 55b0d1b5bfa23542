"""The memory footprint of a process, from each system's own layout."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vlm_server.platform import footprint


@pytest.fixture
def on_macos(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A macOS whose library answers with `status`, and writes 8 bytes of 1, 2, 3 … each."""
    system = SimpleNamespace(status=0, asked=[])

    def proc_pid_rusage(pid: int, flavor: int, info: Any) -> int:
        system.asked.append((pid, flavor))
        numbers = range(1, ctypes.sizeof(info._obj) // 8 + 1)
        written = b"".join(number.to_bytes(8, sys.byteorder) for number in numbers)
        ctypes.memmove(info, written, len(written))
        return system.status

    def library(path: str, use_errno: bool) -> SimpleNamespace:
        assert path == "/usr/lib/libproc.dylib"
        return SimpleNamespace(proc_pid_rusage=proc_pid_rusage)

    monkeypatch.setattr(footprint.sys, "platform", "darwin")
    monkeypatch.setattr(footprint.ctypes, "CDLL", library)
    return system


def test_footprint_on_macos_is_physical_footprint(on_macos: SimpleNamespace):
    """`rusage_info_v0`: 16 bytes of uuid, then eight-byte numbers, the footprint the eighth."""
    assert footprint.footprint_bytes() == 2 + 8
    assert on_macos.asked == [(os.getpid(), 0)]


def test_failed_macos_query_is_footprint_of_zero(on_macos: SimpleNamespace):
    on_macos.status = -1
    assert footprint.footprint_bytes() == 0


def test_footprint_on_linux_is_resident_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    statm = tmp_path / "7/statm"
    statm.parent.mkdir()
    statm.write_text("900 25 3 4 0 5 0\n")
    monkeypatch.setattr(footprint, "_PROC", tmp_path)
    monkeypatch.setattr(footprint.sys, "platform", "linux")
    assert footprint.footprint_bytes(7) == 25 * os.sysconf("SC_PAGE_SIZE")
    statm.unlink()
    assert footprint.footprint_bytes(7) == 0
