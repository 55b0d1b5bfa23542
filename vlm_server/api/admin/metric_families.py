"""The metric families of one scrape."""

from __future__ import annotations

from typing import TypeVar

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from vlm_server.api.http.model_metrics import Histogram

Kind = TypeVar(
    "Kind", GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily, InfoMetricFamily
)


class MetricFamilies:
    """Prometheus' metric families by name, filled in any order."""

    def __init__(self, prefix: str) -> None:
        self.by_name: dict[str, Metric] = {}
        self._prefix = prefix

    def family(self, kind: type[Kind], name: str, help_text: str, *labels: str) -> Kind:
        """The family of this name, which is listed even without samples."""
        family = self.by_name.get(name)
        if family is None:
            family = self.by_name[name] = kind(f"{self._prefix}{name}", help_text, labels=labels)
        assert isinstance(family, kind)
        return family

    def gauge(self, name: str, help_text: str, value: float, **labels: str) -> None:
        family = self.family(GaugeMetricFamily, name, help_text, *labels)
        family.add_metric(list(labels.values()), value)

    def counter(self, name: str, help_text: str, value: float, **labels: str) -> None:
        """Add a counter; the library appends `_total` to its name."""
        family = self.family(CounterMetricFamily, name, help_text, *labels)
        family.add_metric(list(labels.values()), value)

    def histogram(self, name: str, help_text: str, value: Histogram, **labels: str) -> None:
        family = self.family(HistogramMetricFamily, name, help_text, *labels)
        family.add_metric(list(labels.values()), value.samples(), value.sum)

    def info(self, name: str, help_text: str, values: dict[str, str]) -> None:
        """Add `values` as labels of 1; the library appends `_info` to the name."""
        self.family(InfoMetricFamily, name, help_text).add_metric([], values)
