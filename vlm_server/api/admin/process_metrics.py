"""What runs: versions, and the processes of the daemon as the operating system sees them."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import cast

from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

import vlm_server
from vlm_server.api.admin.metric_families import MetricFamilies

_SHOWN = {
    "process_cpu_seconds": "Processor time of a process, in user and system mode.",
    "process_resident_memory_bytes": "Memory of a process that is resident.",
    "process_open_fds": "Open files and sockets of a process.",
    "process_max_fds": "Limit on these.",
    "process_start_time_seconds": "Start of a process, in seconds since 1970.",
}


def add_build(families: MetricFamilies) -> None:
    families.info("build", "Versions of what runs.", versions())


@cache
def versions() -> dict[str, str]:
    """The versions by name; empty for what is not installed as a package."""
    found = {"version": vlm_server.__version__, "python": platform.python_version()}
    for package in ("mlx", "mlx-vlm"):
        try:
            found[package.replace("-", "_")] = version(package)
        except PackageNotFoundError:
            found[package.replace("-", "_")] = ""
    return found


def add_process(families: MetricFamilies, process: str, model: str, pid: int | str) -> None:
    """Add the metrics of a process. None of a process that has ended, and none without /proc."""
    registry = cast(CollectorRegistry, None)  # it registers nowhere
    for metric in ProcessCollector(pid=lambda: pid, registry=registry).collect():
        if metric.name in _SHOWN:
            add = families.counter if metric.type == "counter" else families.gauge
            (sample,) = metric.samples
            help_text = _SHOWN[metric.name]
            add(metric.name, help_text, sample.value, process=process, model_name=model)
