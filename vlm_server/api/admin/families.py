"""Metric families of Prometheus' library, filled in any order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from vlm_server.api.http.model_metrics import Histogram

Sample = tuple[str, str, float]
"""(name, help, value) of a metric."""


class Families:
    """Samples by name; all samples of a name have the same labels."""

    def __init__(self, prefix: str) -> None:
        """`prefix`: of all names."""
        self._prefix = prefix
        self._gauges: dict[str, GaugeMetricFamily] = {}
        self._counters: dict[str, CounterMetricFamily] = {}
        self._histograms: dict[str, HistogramMetricFamily] = {}

    def gauge(self, name: str, help_text: str, value: float, **labels: str) -> None:
        family = self._gauges.get(name)
        if family is None:
            family = GaugeMetricFamily(f"{self._prefix}{name}", help_text, labels=list(labels))
            self._gauges[name] = family
        family.add_metric(list(labels.values()), value)

    def counter(self, name: str, help_text: str, value: float, **labels: str) -> None:
        """The library adds `_total` to the name."""
        self.counter_family(name, help_text, *labels).add_metric(list(labels.values()), value)

    def gauges(self, samples: Iterable[Sample], **labels: str) -> None:
        for name, help_text, value in samples:
            self.gauge(name, help_text, value, **labels)

    def counters(self, samples: Iterable[Sample], **labels: str) -> None:
        for name, help_text, value in samples:
            self.counter(name, help_text, value, **labels)

    def counter_family(self, name: str, help_text: str, *labels: str) -> CounterMetricFamily:
        """The family of a counter, which is told of even if nothing was counted."""
        family = self._counters.get(name)
        if family is None:
            family = CounterMetricFamily(f"{self._prefix}{name}", help_text, labels=labels)
            self._counters[name] = family
        return family

    def histogram(self, name: str, help_text: str, value: Histogram, **labels: str) -> None:
        family = self._histograms.get(name)
        if family is None:
            family = HistogramMetricFamily(f"{self._prefix}{name}", help_text, labels=list(labels))
            self._histograms[name] = family
        family.add_metric(list(labels.values()), value.buckets(), value.sum)

    def __iter__(self) -> Iterator[Metric]:
        yield from self._gauges.values()
        yield from self._counters.values()
        yield from self._histograms.values()
