"""`GET /metrics`, for Prometheus. Never sends the engine a request.

Values are collected at each scrape, so there is no registry to keep up to date. Metrics of the
engine are left out until it has reported its stats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from vlm_server.api.admin.metric_families import MetricFamilies, add_build, add_process
from vlm_server.api.batches.lane import PAUSES, Lane
from vlm_server.api.files.store import FileStore
from vlm_server.api.http.access_log import AnsweredRequests
from vlm_server.api.http.documents.drawing import Documents
from vlm_server.api.http.generation import Generation
from vlm_server.api.http.model_metrics import KeyUsage, ModelMetrics
from vlm_server.api.http.queue.queue_slots import QueueSlots
from vlm_server.api.http.streams.event_logs import EventLogs
from vlm_server.protocol import CacheStats, Stats
from vlm_server.supervisor.engine_process.client import EngineStatus

_ON_DEVICE = ("encoder", "tile", "prefix")


class ResponseStoreSize(Sized, Protocol):
    """The size of the store of responses."""

    limit_bytes: int
    num_evicted: int

    @property
    def size_bytes(self) -> int: ...


class WatchFigures(Sized, Protocol):
    """The figures of all watches."""

    @property
    def size_bytes(self) -> int: ...
    @property
    def frames(self) -> Mapping[str, int]: ...
    @property
    def total_answers(self) -> int: ...
    @property
    def device_seconds(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Metrics:
    """The endpoint, and the collector that it scrapes. All names begin with `prefix`."""

    prefix: str
    shared: Generation
    answered: AnsweredRequests
    stored: ResponseStoreSize
    watches: WatchFigures
    lane: Lane

    async def scrape(self, request: Request) -> Response:
        """Prometheus' text format, or OpenMetrics for those that ask for it."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self), headers={"Content-Type": content_type, "Vary": "Accept"})

    def collect(self) -> Iterable[Metric]:
        families, models = MetricFamilies(self.prefix), self.shared.models
        add_build(families)
        add_process(families, "front", "", "self")
        _add_keys(families, self.shared.key_usage)
        _add_front(families, self.shared.queue_slots, self.answered)
        _add_stored(families, self.stored)
        _add_files(families, self.shared.files)
        _add_batches(families, self.lane)
        _add_streams(families, self.shared.event_logs)
        _add_documents(families, self.shared.documents)
        _add_watches(families, self.watches)
        for name in models.names:
            if models.base(name) is None:
                _add_engine(families, status := models.status(name))
                if status.pid is not None:
                    add_process(families, "engine", name, status.pid)
            _add_answers(families, name, self.shared.metrics[name])
        return families.by_name.values()


def _add_front(families: MetricFamilies, slots: QueueSlots, answered: AnsweredRequests) -> None:
    families.gauge("requests_in_flight", slots.requests.taken)
    families.gauge("requests_limit", slots.requests.limit)
    families.gauge("requests_waiting_bytes", slots.waiting_bytes.taken)
    families.gauge("requests_waiting_bytes_limit", slots.waiting_bytes.limit)
    families.family(CounterMetricFamily, "requests", "route", "status")
    for (route, status), count in answered.items():
        families.counter("requests", count, route=route, status=str(status))


def _add_keys(families: MetricFamilies, usage: KeyUsage) -> None:
    families.family(CounterMetricFamily, "key_prompt_tokens", "key", "model_name")
    families.family(CounterMetricFamily, "key_generation_tokens", "key", "model_name")
    for key, model, prompt_tokens, generation_tokens in usage:
        labels = {"key": key, "model_name": model}
        families.counter("key_prompt_tokens", prompt_tokens, **labels)
        families.counter("key_generation_tokens", generation_tokens, **labels)


def _add_files(families: MetricFamilies, files: FileStore) -> None:
    families.gauge("stored_files", len(files))
    families.gauge("stored_files_size_bytes", files.size_bytes)
    families.gauge("stored_files_limit_bytes", files.limit_bytes)
    families.counter("stored_files_evictions", files.num_evicted)


def _add_batches(families: MetricFamilies, lane: Lane) -> None:
    families.gauge("batches_active", lane.num_active)
    families.gauge("batch_lines_running", lane.num_running)
    for end, count in lane.lines.items():
        families.counter("batch_lines", count, end=end)
    for reason in PAUSES:
        families.gauge("batches_paused", int(reason == lane.paused), reason=reason)


def _add_stored(families: MetricFamilies, stored: ResponseStoreSize) -> None:
    families.gauge("stored_responses", len(stored))
    families.gauge("stored_responses_size_bytes", stored.size_bytes)
    families.gauge("stored_responses_limit_bytes", stored.limit_bytes)
    families.counter("stored_responses_evictions", stored.num_evicted)


def _add_streams(families: MetricFamilies, logs: EventLogs) -> None:
    families.gauge("resumable_streams", len(logs))
    families.gauge("resumable_streams_size_bytes", logs.size_bytes)
    families.gauge("resumable_streams_limit_bytes", logs.limit_bytes)
    families.counter("resumed_streams", logs.num_resumed)
    families.counter("abandoned_streams", logs.num_abandoned)


def _add_documents(families: MetricFamilies, documents: Documents) -> None:
    counts, cache = documents.counts, documents.cache
    families.counter("documents", counts.documents)
    families.counter("document_pages", counts.pages)
    families.counter("cached_document_pages", counts.cached_pages)
    families.counter("document_draw_seconds", counts.seconds)
    families.gauge("document_cache_size_bytes", cache.size_bytes)
    families.gauge("document_cache_limit_bytes", cache.limit_bytes)


def _add_watches(families: MetricFamilies, watches: WatchFigures) -> None:
    families.gauge("watches", len(watches))
    families.gauge("watches_size_bytes", watches.size_bytes)
    for fate in ("asked", "unchanged", "skipped", "failed"):
        families.counter("watch_frames", watches.frames[fate], fate=fate)
    families.counter("watch_answers", watches.total_answers)
    families.counter("watch_device_seconds", watches.device_seconds)


def _add_answers(families: MetricFamilies, model: str, metrics: ModelMetrics) -> None:
    """Add the histograms of answers, under vLLM's names where vLLM has them."""
    add = partial(families.histogram, model_name=model)
    add("time_to_first_token_seconds", metrics.time_to_first_token)
    add("inter_token_latency_seconds", metrics.inter_token_latency)
    add("stream_longest_silence_seconds", metrics.longest_silence)
    add("e2e_request_latency_seconds", metrics.latency)
    add("request_inference_time_seconds", metrics.inference)
    add("request_prompt_tokens", metrics.prompt_tokens)
    add("request_generation_tokens", metrics.generation_tokens)
    add("request_image_tokens", metrics.image_tokens)
    for phase, histogram in metrics.phases.items():
        add(f"request_{phase}_time_seconds", histogram)
    families.gauge("num_requests_running", metrics.num_running, model_name=model)
    families.gauge("num_requests_waiting", metrics.num_waiting, model_name=model)
    counter = partial(families.counter, model_name=model)
    for reason, count in metrics.ended.items():
        counter("request_success", count, finished_reason=reason)


def _add_engine(families: MetricFamilies, status: EngineStatus) -> None:
    """Add the metrics of a model's engine; without `Stats`, only those of the process."""
    gauge = partial(families.gauge, model_name=status.model_name)
    counter = partial(families.counter, model_name=status.model_name)
    gauge("engine_up", status.pid is not None)
    gauge("engine_ready", status.is_ready)
    gauge("model_load_failed", status.state == "failed" or bool(status.error))
    gauge("quarantined_shapes", status.quarantined_shapes)
    counter("engine_restarts", status.restarts)
    counter("quarantine_refusals", status.quarantine_refusals)
    if status.stats is not None:
        _add_requests(families, status.model_name, status.stats)
        _add_memory(families, status.model_name, status.stats)
        for cache in status.stats.caches:
            _add_cache(families, status.model_name, cache)


def _add_requests(families: MetricFamilies, model: str, stats: Stats) -> None:
    gauge = partial(families.gauge, model_name=model)
    counter = partial(families.counter, model_name=model)
    for state, count in stats.requests.items():
        gauge("engine_requests", count, state=state)
    gauge("engine_tracked_requests", stats.tracked)
    for who, count in stats.tracked_by.items():
        gauge("engine_tracked", count, who=who)
    counter("generation_tokens", stats.generated_tokens)
    counter("prompt_tokens", stats.prompt_tokens)
    counter("prefix_cache_queries", stats.prompt_tokens)
    counter("prefix_cache_hits", stats.cached_tokens)
    counter("mm_cache_queries", stats.media_items)
    counter("mm_cache_hits", stats.cached_media_items)
    counter("tool_calls", stats.tool_calls)
    counter("broken_tool_calls", stats.broken_tool_calls)
    counter("spec_decode_num_drafts", stats.spec_drafts)
    counter("spec_decode_num_draft_tokens", stats.spec_draft_tokens)
    counter("spec_decode_num_accepted_tokens", stats.spec_accepted_tokens)
    counter("spec_decode_num_trained_draft_tokens", stats.spec_trained_draft_tokens)
    counter("spec_decode_num_trained_accepted_tokens", stats.spec_trained_accepted_tokens)


def _add_memory(families: MetricFamilies, model: str, stats: Stats) -> None:
    gauge, memory = partial(families.gauge, model_name=model), stats.memory
    counter = partial(families.counter, model_name=model)
    gauge("memory_active_bytes", memory.active_bytes)
    gauge("memory_pool_bytes", memory.pool_bytes)
    gauge("memory_peak_bytes", memory.peak_bytes)
    gauge("memory_limit_bytes", memory.limit_bytes)
    gauge("memory_baseline_bytes", memory.baseline_bytes)
    gauge("memory_footprint_bytes", memory.footprint_bytes)
    if memory.device_used_bytes:  # else the device has no driver that counts it
        gauge("memory_device_used_bytes", memory.device_used_bytes)
    gauge("kv_cache_usage_perc", _memory_usage(stats))
    for kind, count in memory.decisions.items():
        counter("memory_decisions", count, kind=kind)
    counter("memory_clear_seconds", memory.clear_seconds)


def _memory_usage(stats: Stats) -> float:
    """The share of the device memory besides the weights that no eviction can free, 0 to 1."""
    memory = stats.memory
    room = memory.limit_bytes - memory.baseline_bytes
    if room <= 0:
        return 0.0
    caches = device_caches(stats)
    evictable = sum(cache.size_bytes - cache.pinned_bytes for cache in caches)
    used = memory.active_bytes - memory.baseline_bytes - evictable
    return min(1.0, max(0.0, used / room))


def device_caches(stats: Stats) -> list[CacheStats]:
    """The caches that hold device memory."""
    return [cache for cache in stats.caches if cache.name in _ON_DEVICE]


def _add_cache(families: MetricFamilies, model: str, cache: CacheStats) -> None:
    gauge = partial(families.gauge, model_name=model, cache=cache.name)
    counter = partial(families.counter, model_name=model, cache=cache.name)
    gauge("cache_size_bytes", cache.size_bytes)
    gauge("cache_pinned_bytes", cache.pinned_bytes)
    gauge("cache_limit_bytes", cache.limit_bytes)
    gauge("cache_entries", cache.entries)
    counter("cache_hits", cache.hits)
    counter("cache_misses", cache.misses)
    counter("cache_evictions", cache.evictions)
    counter("cache_damaged", cache.damaged)
