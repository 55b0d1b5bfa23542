"""The cost of an idle process: its share of a core, and its wake-ups."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Threads:
    """CPU seconds, voluntary context switches and names of a process's threads."""

    cpu_seconds: float
    switches: Mapping[int, int]
    names: Mapping[int, str]


@dataclass(frozen=True)
class IdleCost:
    """The cost of several processes together, over some seconds."""

    core_share: float
    wakeups_per_second: float
    by_thread: Mapping[str, float]
    """Wake-ups per second of those that had any."""


def family_of(pid: int) -> list[int]:
    """The process and all its descendants."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    own, found = set[int](), {pid}
    while found:
        own |= found
        found = {child for child, parent in parents.items() if parent in own} - own
    return sorted(own)


def measure(pids: list[int], seconds: float) -> IdleCost:
    """The cost of `pids` in the next `seconds`."""
    before, began = {pid: _read(pid) for pid in pids}, time.monotonic()
    time.sleep(seconds)
    after, passed = {pid: _read(pid) for pid in pids}, time.monotonic() - began
    cpu = sum(after[pid].cpu_seconds - before[pid].cpu_seconds for pid in pids)
    by_thread = {
        f"{pid}/{thread} {after[pid].names[thread]}": (count - before[pid].switches[thread])
        / passed
        for pid in pids
        for thread, count in after[pid].switches.items()
        if count > before[pid].switches.get(thread, count)
    }
    return IdleCost(cpu / passed, sum(by_thread.values()), by_thread)


def _read(pid: int) -> Threads:
    names, switches, cpu = {}, {}, 0.0
    for folder in Path(f"/proc/{pid}/task").iterdir():
        thread = int(folder.name)
        try:
            status = (folder / "status").read_text()
            cpu += _cpu_seconds(folder)
        except (FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            continue
        lines = dict(line.split(":", 1) for line in status.splitlines())
        names[thread] = lines["Name"].strip()
        switches[thread] = int(lines["voluntary_ctxt_switches"])
    return Threads(cpu, switches, names)


def _cpu_seconds(folder: Path) -> float:
    """CPU seconds, with the scheduler's nanoseconds where the kernel keeps them."""
    try:
        return int((folder / "schedstat").read_text().split()[0]) / 1e9
    except (OSError, IndexError):
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def main() -> None:
    """Print the cost of a process and its children, several times."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    pids = family_of(options.pid)
    costs = [measure(pids, options.seconds) for _ in range(options.rounds)]
    for name in sorted(costs[-1].by_thread):
        print(f"{costs[-1].by_thread[name]:7.2f} /s  {name}")
    for text, values in (
        ("% of a core", [100 * cost.core_share for cost in costs]),
        ("wake-ups per second", [cost.wakeups_per_second for cost in costs]),
    ):
        spread = f"[{min(values):.3f}-{max(values):.3f}]"
        print(f"{statistics.median(values):.3f} {spread} {text}, {len(pids)} processes")


if __name__ == "__main__":
    main()
