"""`GET /metrics`, for Prometheus. Never sends the engine a request.

Values are collected at each scrape, so there is no registry to keep up to date. Metrics of the
engine are left out until it has reported its stats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Protocol

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from vlm_server.api.http.access_log import AnsweredRequests
from vlm_server.api.http.queue.queue_slots import QueueSlots
from vlm_server.protocol import CacheStats, MemoryStats, Stats
from vlm_server.supervisor.client import EngineClient, EngineStatus


class Stored(Sized, Protocol):
    """The responses that the front keeps for clients."""

    limit_bytes: int
    num_evicted: int

    @property
    def size_bytes(self) -> int: ...


class Metrics:
    """The endpoint, and the collector it scrapes."""

    def __init__(
        self,
        engine: EngineClient,
        queue_slots: QueueSlots,
        answered: AnsweredRequests,
        stored: Stored,
    ) -> None:
        self._stored = stored
        self._engine = engine
        self._queue_slots = queue_slots
        self._answered = answered

    async def scrape(self, _: Request) -> Response:
        return Response(generate_latest(self), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    def collect(self) -> Iterator[Metric]:
        yield from _of_front(self._queue_slots, self._answered)
        yield from _of_stored(self._stored)
        status = self._engine.status
        yield from _of_engine(status)
        if status.stats is not None:
            yield from _of_stats(status.stats)
            yield from _of_caches(status.stats.caches)


def _of_front(queue_slots: QueueSlots, answered: AnsweredRequests) -> Iterator[Metric]:
    yield _gauge("requests_in_flight", "Requests that hold a queue slot.", queue_slots.taken)
    yield _gauge("requests_limit", "Queue slots: `limits.max_requests`.", queue_slots.limit)
    yield _gauge(
        "requests_waiting_bytes",
        "Bodies of requests that the device has not begun with.",
        queue_slots.waiting_bytes,
    )
    yield _gauge(
        "requests_waiting_bytes_limit",
        "Limit on these: `limits.max_waiting_bytes`.",
        queue_slots.waiting_bytes_limit,
    )
    requests = CounterMetricFamily(
        "vlm_server_requests",
        "Requests that ended, by route and status.",
        labels=["route", "status"],
    )
    for (route, status), count in answered.items():
        requests.add_metric([route, str(status)], count)
    yield requests


def _of_stored(stored: Stored) -> Iterator[Metric]:
    yield _gauge("stored_responses", "Responses that clients may go on from.", len(stored))
    yield _gauge(
        "stored_responses_size_bytes", "Size of these, with their turns.", stored.size_bytes
    )
    yield _gauge(
        "stored_responses_limit_bytes",
        "Its limit: `server.responses_store_bytes`.",
        stored.limit_bytes,
    )
    yield _counter(
        "stored_responses_evictions",
        "Responses that were dropped for want of room.",
        stored.num_evicted,
    )


def _of_engine(status: EngineStatus) -> Iterator[Metric]:
    yield _gauge("engine_up", "Whether an engine process is running.", status.pid is not None)
    yield _gauge("engine_ready", "Whether requests are accepted.", status.is_ready)
    yield _counter("engine_restarts", "Restarts of the engine process.", status.restarts)
    yield _gauge(
        "quarantined_shapes",
        "Sizes of requests that are refused because engines crashed on them.",
        status.quarantined_shapes,
    )
    yield _counter(
        "quarantine_refusals",
        "Requests refused because engines crashed on their size.",
        status.quarantine_refusals,
    )


def _of_stats(stats: Stats) -> Iterator[Metric]:
    states = GaugeMetricFamily(
        "vlm_server_engine_requests", "Requests in the engine, by state.", labels=["state"]
    )
    for state, count in stats.requests.items():
        states.add_metric([state], count)
    yield states
    yield _gauge("engine_tracked_requests", "Requests in the engine.", stats.tracked)
    trackers = GaugeMetricFamily(
        "vlm_server_engine_tracked",
        "Requests that a part of the engine keeps state for; 0 when idle.",
        labels=["who"],
    )
    for who, count in stats.tracked_by.items():
        trackers.add_metric([who], count)
    yield trackers
    yield from _of_memory(stats.memory)
    yield _counter("generated_tokens", "Generated tokens.", stats.generated_tokens)
    yield _counter("prompt_tokens", "Prompt tokens.", stats.prompt_tokens)
    yield _counter(
        "cached_prompt_tokens", "Prompt tokens found in the prefix cache.", stats.cached_tokens
    )
    yield _counter("tool_calls", "Complete tool calls.", stats.tool_calls)
    yield _counter(
        "broken_tool_calls",
        "Tool calls that were sent as text, or were cut off.",
        stats.broken_tool_calls,
    )


def _of_memory(memory: MemoryStats) -> Iterator[Metric]:
    yield _gauge("memory_active_bytes", "Device memory in use by arrays.", memory.active_bytes)
    yield _gauge("memory_pool_bytes", "Freed device memory kept for reuse.", memory.pool_bytes)
    yield _gauge("memory_peak_bytes", "Peak device memory.", memory.peak_bytes)
    yield _gauge("memory_limit_bytes", "Limit on device memory.", memory.limit_bytes)
    yield _gauge(
        "memory_baseline_bytes",
        "Device memory in use without requests: the weights.",
        memory.baseline_bytes,
    )
    yield _gauge(
        "memory_footprint_bytes",
        "Memory of the engine process as the operating system counts it.",
        memory.footprint_bytes,
    )
    yield _gauge(
        "memory_device_used_bytes",
        "GPU memory in use by all programs; 0 without dedicated GPU memory.",
        memory.device_used_bytes,
    )
    decisions = CounterMetricFamily(
        "vlm_server_memory_decisions", "Actions of the memory governor, by kind.", labels=["kind"]
    )
    for kind, count in memory.decisions.items():
        decisions.add_metric([kind], count)
    yield decisions
    yield _counter("memory_clear_seconds", "Time spent releasing the pool.", memory.clear_seconds)


def _of_caches(caches: Iterable[CacheStats]) -> Iterator[Metric]:
    """One sample per cache in each metric family."""
    size = _cache_gauge("size_bytes", "Size of a cache.")
    pinned = _cache_gauge("pinned_bytes", "Bytes in use by requests.")
    limit = _cache_gauge("limit_bytes", "Largest size of a cache.")
    entries = _cache_gauge("entries", "Entries of a cache.")
    hits = _cache_counter("hits", "Lookups that hit.")
    misses = _cache_counter("misses", "Lookups that missed.")
    evictions = _cache_counter("evictions", "Evicted entries.")
    damaged = _cache_counter("damaged", "Damaged entries, which were deleted.")
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
