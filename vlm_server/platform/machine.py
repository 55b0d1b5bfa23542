"""The machine's memory and processors that this process may use, by its control groups.

A container or a service may be limited far below what the machine has (`memory.max`, `cpu.max`),
and a process that goes by the machine's own figures is killed or throttled for it. The limits of
all enclosing groups apply; those above the root of a container can't be seen from inside.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from pathlib import Path

NO_PRESSURE = 1
_PRESSURE = b"kern.memorystatus_vm_pressure_level"
_ROOT = Path("/")
_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "RAYON_NUM_THREADS")


def memory_bytes(root: Path = _ROOT) -> int:
    """The machine's memory, or the least that a control group of this process allows.

    `root` is the folder that has `proc` and `sys`.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [_number(group / name) for group in _groups("memory", root) for name in names]
    return min([physical, *(limit for limit in limits if limit is not None and limit > 0)])


def memory_pressure() -> int:
    """The machine's memory pressure as macOS reports it: `NO_PRESSURE`, 2 or 4.

    `NO_PRESSURE` where nothing can be read.
    """
    level = ctypes.c_int(NO_PRESSURE)
    size = ctypes.c_size_t(ctypes.sizeof(level))
    try:
        sysctl = ctypes.CDLL(None).sysctlbyname
    except AttributeError:  # not on macOS
        return NO_PRESSURE
    status = sysctl(_PRESSURE, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0))
    return NO_PRESSURE if status else level.value


def num_cpus(root: Path = _ROOT) -> int:
    """Processors that this process may keep busy: those it may run on, or its quota, rounded up."""
    quotas = [quota for group in _groups("cpu", root) if (quota := _cpu_quota(group)) is not None]
    return max(1, math.ceil(min([_num_visible_cpus(), *quotas])))


def thread_environment(root: Path = _ROOT) -> dict[str, str]:
    """Environment variables for libraries that start a thread for each processor they see.

    Empty where that is right. Under a quota, threads beyond it would use it up early in each
    period, and then none of them runs.
    """
    max_cpus = num_cpus(root)
    if max_cpus >= _num_visible_cpus():
        return {}
    return dict.fromkeys(_THREAD_VARIABLES, str(max_cpus))


def _num_visible_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_quota(group: Path) -> float | None:
    """Processors, from `cpu.max` of version 2 or the quota of version 1; None for no limit."""
    words = _read(group / "cpu.max").split()
    if len(words) != 2:
        words = [_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    quota, period = (int(word) if word.isdecimal() else 0 for word in words)
    return quota / period if quota and period else None


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's control group and of those around it, as far as mounted."""
    own_groups = _own_groups(_read(root / "proc/self/cgroup"))
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        mounted, (kind, _, options) = before.split(), (*after.split(), "", "", "")[:3]
        if kind == "cgroup2":
            group = own_groups.get("")
        elif kind == "cgroup" and controller in options.split(","):
            group = own_groups.get(controller)
        else:
            continue
        if group is not None and len(mounted) > 4:
            top = root / _unescape(mounted[4]).lstrip("/")
            yield from _folders(top, _below(group, _unescape(mounted[3])))


def _own_groups(text: str) -> dict[str, str]:
    """Paths of this process's groups by controller; that of version 2 has the name ``."""
    groups = {}
    for line in text.splitlines():
        _, _, path = line.partition(":")
        controllers, _, path = path.partition(":")
        groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _below(group: str, mounted: str) -> Path:
    """`group` relative to the group that is mounted; the latter if it is not inside."""
    try:
        relative = Path(group).relative_to(mounted)
    except ValueError:
        return Path()
    return Path() if ".." in relative.parts else relative


def _folders(top: Path, group: Path) -> Iterator[Path]:
    """`top / group` and the folders around it, up to `top`."""
    yield top / group
    yield from (top / parent for parent in group.parents)


def _unescape(path: str) -> str:
    """A path of mountinfo, where spaces and the like are octal escapes."""
    return path.encode("latin-1", "replace").decode("unicode_escape") if "\\" in path else path


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    """The text of a file; empty if there is none that can be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
