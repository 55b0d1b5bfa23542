"""`GET /metrics`: what Prometheus scrapes. Knows counts and sizes; asks nothing of the engine.

All is read when it is asked for, so there is no global registry and nothing to keep in step.
What the engine says of itself is left out while no engine has said anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from vlm_server.api.http.access_log import AnsweredRequests
from vlm_server.api.http.places import Places
from vlm_server.protocol import CacheStats, MemoryStats, Stats
from vlm_server.supervisor.client import EngineClient, EngineStatus


class Metrics:
    """The endpoint, and the collector that it reads."""

    def __init__(self, engine: EngineClient, places: Places, answered: AnsweredRequests) -> None:
        self._engine = engine
        self._places = places
        self._answered = answered

    async def scrape(self, _: Request) -> Response:
        return Response(generate_latest(self), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    def collect(self) -> Iterator[Metric]:
        yield from _of_front(self._places, self._answered)
        status = self._engine.status
        yield from _of_engine(status)
        if status.stats is not None:
            yield from _of_stats(status.stats)
            yield from _of_caches(status.stats.caches)


def _of_front(places: Places, answered: AnsweredRequests) -> Iterator[Metric]:
    yield _gauge("requests_in_flight", "Requests that hold a queue place.", places.taken)
    yield _gauge("requests_limit", "Queue places: `limits.max_requests`.", places.limit)
    requests = CounterMetricFamily(
        "vlm_server_requests",
        "Requests that ended, by route and status.",
        labels=["route", "status"],
    )
    for (route, status), count in answered.items():
        requests.add_metric([route, str(status)], count)
    yield requests


def _of_engine(status: EngineStatus) -> Iterator[Metric]:
    yield _gauge("engine_up", "Whether an engine process runs.", status.pid is not None)
    yield _gauge("engine_ready", "Whether requests are taken.", status.is_ready)
    yield _counter("engine_restarts", "Restarts of the engine process.", status.restarts)
    yield _gauge(
        "quarantined_shapes",
        "Sizes of requests that are refused because engines died of them.",
        status.quarantined_shapes,
    )
    yield _counter(
        "quarantine_refusals", "Requests refused for their size.", status.quarantine_refusals
    )


def _of_stats(stats: Stats) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "vlm_server_engine_requests", "Requests in the engine, by state.", labels=["state"]
    )
    states.add_metric(["waiting"], stats.waiting)
    states.add_metric(["preparing"], stats.preparing)
    states.add_metric(["prefilling"], stats.prefilling)
    states.add_metric(["decoding"], stats.decoding)
    yield states
    yield _gauge("engine_tracked_requests", "Requests that the engine knows of.", stats.tracked)
    trackers = GaugeMetricFamily(
        "vlm_server_engine_tracked",
        "What is remembered of requests, by who remembers it; 0 when idle.",
        labels=["who"],
    )
    for who, count in stats.tracked_by.items():
        trackers.add_metric([who], count)
    yield trackers
    yield from _of_memory(stats.memory)
    yield _counter("generated_tokens", "Tokens of answers.", stats.generated_tokens)
    yield _counter("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens)
    yield _counter(
        "cached_prompt_tokens", "Tokens of prompts that the prefix cache had.", stats.cached_tokens
    )


def _of_memory(memory: MemoryStats) -> Iterator[Metric]:
    yield _gauge("memory_active_bytes", "Device memory that arrays hold.", memory.active_bytes)
    yield _gauge("memory_pool_bytes", "Freed device memory kept for reuse.", memory.pool_bytes)
    yield _gauge("memory_peak_bytes", "Most device memory ever held.", memory.peak_bytes)
    yield _gauge("memory_limit_bytes", "Device memory that may be used.", memory.limit_bytes)
    yield _gauge(
        "memory_baseline_bytes", "Held without any request: weights.", memory.baseline_bytes
    )
    yield _gauge(
        "memory_footprint_bytes",
        "What the system counts for the engine process.",
        memory.footprint_bytes,
    )
    yield _gauge(
        "memory_device_used_bytes",
        "What the GPU's driver counts for all programs; 0 without a GPU of its own memory.",
        memory.device_used_bytes,
    )
    decisions = CounterMetricFamily(
        "vlm_server_memory_decisions", "What was done about memory, by kind.", labels=["kind"]
    )
    for kind, count in memory.decisions.items():
        decisions.add_metric([kind], count)
    yield decisions
    yield _counter("memory_clear_seconds", "Time that clearing took.", memory.clear_seconds)


def _of_caches(caches: Iterable[CacheStats]) -> Iterator[Metric]:
    """Each family has a sample for each cache."""
    size = _cache_gauge("size_bytes", "What a cache holds.")
    pinned = _cache_gauge("pinned_bytes", "Of that, what requests use.")
    limit = _cache_gauge("limit_bytes", "The most that a cache may hold.")
    entries = _cache_gauge("entries", "Entries of a cache.")
    hits = _cache_counter("hits", "Look-ups that found something.")
    misses = _cache_counter("misses", "Look-ups that found nothing.")
    evictions = _cache_counter("evictions", "Entries that made room for others.")
    damaged = _cache_counter("damaged", "Entries that were found damaged, and deleted.")
    for cache in caches:
        label = [cache.name]
        size.add_metric(label, cache.size_bytes)
        pinned.add_metric(label, cache.pinned_bytes)
        limit.add_metric(label, cache.limit_bytes)
        entries.add_metric(label, cache.entries)
        hits.add_metric(label, cache.hits)
        misses.add_metric(label, cache.misses)
        evictions.add_metric(label, cache.evictions)
        damaged.add_metric(label, cache.damaged)
    yield from (size, pinned, limit, entries, hits, misses, evictions, damaged)


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"vlm_server_{name}", help_text, value=value)


def _counter(name: str, help_text: str, value: float) -> Metric:
    """The library adds `_total` to the name."""
    return CounterMetricFamily(f"vlm_server_{name}", help_text, value=value)


def _cache_gauge(name: str, help_text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"vlm_server_cache_{name}", help_text, labels=["cache"])


def _cache_counter(name: str, help_text: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"vlm_server_cache_{name}", help_text, labels=["cache"])
