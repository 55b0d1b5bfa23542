"""The doctor finds full disks, on real small ones where mounting is allowed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from vlm_server.cli.doctor import machine
from vlm_server.settings import MIB


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted disk of 1 MiB with few inodes; skips if mounting is not allowed."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=8", "tmpfs", str(folder)]
    try:
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("no disk can be mounted here")
    except FileNotFoundError:
        pytest.skip("there is no mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_doctor_checks_disk_of_nearest_existing_parent(tmp_path: Path) -> None:
    found = machine.room("disk", tmp_path / "a/b/c", 1, "free some")
    assert found.level == "ok"
    assert not (tmp_path / "a").exists()


def test_doctor_reports_full_disk(small_disk: Path) -> None:
    assert machine.room("disk", small_disk, 1 << 19, "free some").level == "ok"
    (small_disk / "large").write_bytes(bytes(1000 << 10))
    assert machine.room("disk", small_disk, 1 << 19, "free some").level == "problem"
    assert machine.room("disk", small_disk, 1 << 30, "free some").level == "problem"


def test_doctor_reports_disk_without_inodes(small_disk: Path) -> None:
    for number in range(20):
        try:
            (small_disk / str(number)).touch()
        except OSError:
            break
    found = machine.room("disk", small_disk, 1, "free some")
    assert found.level == "problem"
    assert "inodes" in found.text


def test_doctor_warns_of_little_disk_space(tmp_path: Path) -> None:
    free, _ = machine.free_in(tmp_path)
    assert free > 64 * MIB, "this machine's disk is full"
    found = machine.room("disk", tmp_path, free * 2, "free some")
    assert (found.level, found.advice) == ("warning", "free some")
