"""Where a run's time goes: `scripts/test --durations` loads this plugin.

Each test's record has its seconds by phase, its worker, the daemons that it started, and the core
seconds that the machine was idle meanwhile. The 50 slowest tests are printed; tables of all of it
are written to TABLES, as Markdown.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

RECORDS = Path("build/test-durations.jsonl")
TABLES = Path("build/test-durations.md")
NUM_PRINTED, NUM_SLOWEST = 50, 100
_KEY = "durations"
_BEGUN = pytest.StashKey[tuple[float, float, int]]()


@dataclass
class Record:
    """One test. seconds: from its set-up's begin to its tear-down's end."""

    test: str
    worker: str
    begun: float
    seconds: float
    idle_core_seconds: float
    daemons: int
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def file(self) -> str:
        return self.test.split("::")[0]

    @property
    def folder(self) -> str:
        return "/".join(self.file.split("/")[:2])


def idle_core_seconds() -> float:
    """Idle seconds of all cores since the machine started; 0 where the kernel does not say."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


class Measures:
    """Plugin of each process that runs tests: adds a record to each test's last report."""

    def __init__(self) -> None:
        self.num_daemons = 0
        sys.addaudithook(self._count_daemons)

    def _count_daemons(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and isinstance(arguments[1], (list, tuple)):
            self.num_daemons += "serve" in map(str, arguments[1])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        item.stash[_BEGUN] = (time.time(), idle_core_seconds(), self.num_daemons)
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "teardown":
            begun, idle, daemons = item.stash[_BEGUN]
            measured = (time.time() - begun, idle_core_seconds() - idle, self.num_daemons - daemons)
            report.user_properties.append((_KEY, (begun, *measured)))
        return report


class Tables:
    """Plugin of the process that hears of all tests: collects the records, and writes tables."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.phases: dict[str, dict[str, float]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.phases[report.nodeid][report.when or ""] = report.duration
        if report.when == "teardown":
            worker = getattr(report, "worker_id", "main")
            measured: Any = dict(report.user_properties)[_KEY]
            phases = self.phases.pop(report.nodeid)
            test = report.nodeid
            if test.rfind("@") > test.rfind("]"):  # what xdist adds of its group
                test = test.rpartition("@")[0]
            self.records.append(Record(test, worker, *measured, phases))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        RECORDS.parent.mkdir(exist_ok=True)
        RECORDS.write_text("".join(json.dumps(asdict(record)) + "\n" for record in self.records))
        TABLES.write_text(tables(self.records))
        terminalreporter.section(f"slowest {NUM_PRINTED}; tables in {TABLES}")
        for record in slowest(self.records)[:NUM_PRINTED]:
            terminalreporter.line(f"{record.seconds:7.2f} s  {record.test}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Measures())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Tables())


# ---- tables --------------------------------------------------------------------------


def slowest(records: Iterable[Record]) -> list[Record]:
    return sorted(records, key=lambda record: -record.seconds)


def tables(records: list[Record]) -> str:
    """Sums by worker, folder and file, and the slowest tests; "" if there are none."""
    if not records:
        return ""
    wall = max(r.begun + r.seconds for r in records) - min(r.begun for r in records)
    lines = ["| worker | tests | seconds at work | idle, of the run |", "|---|---|---|---|"]
    for worker, its in _grouped(records, lambda record: record.worker):
        seconds = sum(record.seconds for record in its)
        lines.append(f"| {worker} | {len(its)} | {seconds:.0f} | {1 - seconds / wall:.0%} |")
    for title, key in (("folder", _folder), ("file", _file)):
        lines += ["", f"| {title} | tests | seconds | cores idle meanwhile | daemons started |"]
        lines.append("|---|---|---|---|---|")
        lines += [_sums(name, its) for name, its in _grouped(records, key)]
    lines += ["", "| slowest tests | seconds | of them set-up |", "|---|---|---|"]
    for record in slowest(records)[:NUM_SLOWEST]:
        lines.append(
            f"| `{record.test}` | {record.seconds:.1f} | {record.phases.get('setup', 0):.1f} |"
        )
    return "\n".join(lines) + "\n"


def _folder(record: Record) -> str:
    return record.folder


def _file(record: Record) -> str:
    return record.file


def _sums(name: str, records: list[Record]) -> str:
    seconds = sum(record.seconds for record in records)
    idle = sum(record.idle_core_seconds for record in records) / (os.cpu_count() or 1)
    daemons = sum(record.daemons for record in records)
    share = idle / seconds if seconds else 0.0
    return f"| `{name}` | {len(records)} | {seconds:.1f} | {share:.0%} | {daemons} |"


def _grouped(records: list[Record], key: Callable[[Record], str]) -> list[tuple[str, list[Record]]]:
    """Records by key, those with the most seconds first."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return sorted(groups.items(), key=lambda group: -sum(r.seconds for r in group[1]))
