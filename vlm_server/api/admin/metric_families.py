"""The metric families of one scrape, and those of processes and versions."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.process_collector import ProcessCollector

import vlm_server
from vlm_server.api.admin.metric_help import HELP
from vlm_server.api.http.model_metrics import Histogram

Kind = TypeVar(
    "Kind", GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily, InfoMetricFamily
)


class MetricFamilies:
    """Prometheus' metric families by name, filled in any order."""

    def __init__(self, prefix: str) -> None:
        self.by_name: dict[str, Metric] = {}
        self._prefix = prefix

    def family(self, kind: type[Kind], name: str, *labels: str) -> Kind:
        """The family of this name in `HELP`, which is listed even without samples."""
        family = self.by_name.get(name)
        if family is None:
            family = self.by_name[name] = kind(f"{self._prefix}{name}", HELP[name], labels=labels)
        assert isinstance(family, kind)
        return family

    def gauge(self, name: str, value: float, **labels: str) -> None:
        family = self.family(GaugeMetricFamily, name, *labels)
        family.add_metric(list(labels.values()), value)

    def counter(self, name: str, value: float, **labels: str) -> None:
        """Add a counter; the library appends `_total` to its name."""
        family = self.family(CounterMetricFamily, name, *labels)
        family.add_metric(list(labels.values()), value)

    def histogram(self, name: str, value: Histogram, **labels: str) -> None:
        family = self.family(HistogramMetricFamily, name, *labels)
        family.add_metric(list(labels.values()), value.samples(), value.sum)

    def info(self, name: str, values: dict[str, str]) -> None:
        """Add `values` as labels of 1; the library appends `_info` to the name."""
        self.family(InfoMetricFamily, name).add_metric([], values)


# ---- processes and builds ----------------------------------------------------------------


def add_build(families: MetricFamilies) -> None:
    families.info("build", versions())


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
        if metric.name in HELP:
            add = families.counter if metric.type == "counter" else families.gauge
            (sample,) = metric.samples
            add(metric.name, sample.value, process=process, model_name=model)
