"""Limits of control groups, of both versions, nested, and seen from inside a container."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vlm_server.platform import machine

GIB = 1 << 30
V2_MOUNT = "31 23 0:28 {root} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
V1_MOUNTS = (
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:7 - cgroup cgroup rw,memory\n"
)


def system(folder: Path, own: str, mounts: str, **files: str) -> Path:
    """A root folder whose control groups have these files, by path with `__` for a slash."""
    process = folder / "proc/self"
    process.mkdir(parents=True)
    (process / "cgroup").write_text(own)
    (process / "mountinfo").write_text("23 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mounts)
    for name, text in files.items():
        path = folder / "sys/fs/cgroup" / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


@pytest.fixture(autouse=True)
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SC_PHYS_PAGES": 64 * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)


def test_limits_without_cgroups_equal_machine_limits(tmp_path: Path) -> None:
    assert machine.memory_bytes(tmp_path) == 64 * GIB
    assert machine.num_cpus(tmp_path) == 16
    assert machine.thread_environment(tmp_path) == {}


def test_cgroup_without_limits_changes_nothing(tmp_path: Path) -> None:
    files = {
        "a__memory_DOT_max": "max",
        "a__memory_DOT_high": "max",
        "a__cpu_DOT_max": "max 100000",
    }
    root = system(tmp_path, "0::/a\n", V2_MOUNT.format(root="/"), **files)
    assert machine.memory_bytes(root) == 64 * GIB
    assert machine.num_cpus(root) == 16


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"a__b__memory_DOT_max": f"{6 * GIB}"}, 6 * GIB),
        ({"a__b__memory_DOT_high": f"{5 * GIB}", "a__b__memory_DOT_max": f"{6 * GIB}"}, 5 * GIB),
        ({"a__memory_DOT_max": f"{4 * GIB}", "a__b__memory_DOT_max": f"{6 * GIB}"}, 4 * GIB),
        ({"a__memory_DOT_max": f"{900 * GIB}"}, 64 * GIB),
        ({"a__b__memory_DOT_max": "what is this"}, 64 * GIB),
    ],
    ids=["own max", "own high", "max of the parent", "above the machine", "unreadable"],
)
def test_memory_limit_of_cgroup_v2_is_read(
    tmp_path: Path, files: dict[str, str], limit: int
) -> None:
    root = system(tmp_path, "0::/a/b\n", V2_MOUNT.format(root="/"), **files)
    assert machine.memory_bytes(root) == limit


def test_memory_limit_of_cgroup_v1_is_read(tmp_path: Path) -> None:
    own = "4:memory:/service/one\n2:cpu,cpuacct:/service\n0::/\n"
    files = {"memory__service__memory_DOT_limit_in_bytes": f"{3 * GIB}"}
    files |= {"memory__memory_DOT_limit_in_bytes": "9223372036854771712"}
    files |= {"cpu__service__cpu_DOT_cfs_quota_us": "250000"}
    files |= {"cpu__service__cpu_DOT_cfs_period_us": "100000", "cpu__cpu_DOT_cfs_quota_us": "-1"}
    root = system(tmp_path, own, V1_MOUNTS.format(root="/"), **files)
    assert machine.memory_bytes(root) == 3 * GIB
    assert machine.num_cpus(root) == 3


@pytest.mark.parametrize("own", ["/docker/123", "/", "/../other"])
def test_cgroup_inside_container_is_mount_root(tmp_path: Path, own: str) -> None:
    files = {"memory__memory_DOT_limit_in_bytes": f"{2 * GIB}"}
    mounts = V1_MOUNTS.format(root="/docker/123")
    root = system(tmp_path, f"4:memory:{own}\n", mounts, **files)
    assert machine.memory_bytes(root) == 2 * GIB


@pytest.mark.parametrize(
    ("quota", "cpus"), [("200000 100000", 2), ("150000 100000", 2), ("1000 100000", 1)]
)
def test_cpu_limit_of_cgroup_v2_is_read(tmp_path: Path, quota: str, cpus: int) -> None:
    root = system(tmp_path, "0::/a\n", V2_MOUNT.format(root="/"), a__cpu_DOT_max=quota)
    assert machine.num_cpus(root) == cpus
    assert machine.thread_environment(root)["OPENBLAS_NUM_THREADS"] == str(cpus)


def test_memory_pressure_is_zero_where_it_is_unreadable() -> None:
    assert machine.memory_pressure() == machine.NO_PRESSURE


def test_memory_pressure_on_macos_is_read_by_sysctl(monkeypatch: pytest.MonkeyPatch) -> None:
    def sysctlbyname(name: bytes, level: Any, size: Any, new: None, new_size: Any) -> int:
        assert name == b"kern.memorystatus_vm_pressure_level"
        assert (size._obj.value, new, new_size.value) == (4, None, 0)
        level._obj.value = 4
        return 0

    library = SimpleNamespace(sysctlbyname=sysctlbyname)
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: library)
    assert machine.memory_pressure() == 4
