"""Real daemons, each on a core of its own, and the real gateway before them. Linux alone."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from scripts.scale_out import ScaleOut, find_gateway, free_port, gateway_command, get

MODEL = "measured"
SETTINGS = {
    "model.name": MODEL,
    "cache.max_disk_bytes": "0",
    "scheduler.num_speculative_tokens": "0",  # how much drafts save depends on what is said
    "log.level": "warning",
}
_HOST = "127.0.0.1"


class RunningFleet:
    """daemons: their URLs, in the order of their cores. url: of the gateway if there is one."""

    def __init__(self, started: ScaleOut) -> None:
        self._started = started
        self.daemons: list[str] = []
        self.url = ""

    def cpu_seconds(self) -> dict[str, float]:
        """That each process took so far with its children; see `names`."""
        return {name: tree_cpu_seconds(pid) for name, pid in self._started.pids().items()}


@contextmanager
def running(
    model: Path, num_daemons: int, *, with_gateway: bool, settings: Mapping[str, str] | None = None
) -> Iterator[RunningFleet]:
    """Daemons on the first cores of this machine.

    Raises SystemExit if there are too few cores, no `taskset` or no gateway, or one does not start.
    """
    cores = sorted(os.sched_getaffinity(0))
    if num_daemons > len(cores) or shutil.which("taskset") is None:
        raise SystemExit(f"needs taskset, and {num_daemons} cores")
    started = ScaleOut(Path(tempfile.mkdtemp(prefix="vlm-server-simulation-")))
    fleet = RunningFleet(started)
    try:
        for number in range(num_daemons):
            port = free_port()
            url = f"http://{_HOST}:{port}"
            fleet.daemons.append(url)
            chosen = [f"{name}={value}" for name, value in {**SETTINGS, **(settings or {})}.items()]
            command = ["taskset", "-c", str(cores[number]), sys.executable, "-m", "vlm_server.cli"]
            command += ["serve", "--model", str(model), "--host", _HOST, "--port", str(port)]
            command += [part for each in chosen for part in ("--set", each)]
            started.start(f"daemon-{number}", [*command, "--stop-at-eof"])
        for url in fleet.daemons:
            started.wait_for(partial(get, f"{url}/health/ready"))
        if with_gateway:
            _start_gateway(started, fleet)
        yield fleet
    finally:
        started.end()


def _start_gateway(started: ScaleOut, fleet: RunningFleet) -> None:
    program, port = find_gateway(), free_port()
    if program is None:
        raise SystemExit("the gateway is not installed: pip install 'vlm-server[scale]'")
    fleet.url = f"http://{_HOST}:{port}"
    command = gateway_command(program, port, free_port(), fleet.daemons, MODEL)
    started.start("gateway", command)

    def is_ready() -> bool:
        told = get(f"{fleet.url}/readiness")
        return told is not None and told["healthy_workers"] == len(fleet.daemons)

    started.wait_for(is_ready)


def tree_cpu_seconds(pid: int) -> float:
    """Of a process and all that descend from it."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.name)] = int(fields[1])
        ticks[int(entry.name)] = sum(map(int, fields[11:15]))  # with children that have ended
    tree = {pid}
    while found := {one for one, parent in parents.items() if parent in tree} - tree:
        tree |= found
    return sum(ticks.get(one, 0) for one in tree) / os.sysconf("SC_CLK_TCK")
