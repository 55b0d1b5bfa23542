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
    gauge = families.gauge
    waiting = "Bodies of requests that the device has not begun with."
    limit = "Limit on these: `limits.max_waiting_bytes`."
    gauge("requests_in_flight", "Requests that hold a queue slot.", slots.requests.taken)
    gauge("requests_limit", "Queue slots: `limits.max_requests`.", slots.requests.limit)
    gauge("requests_waiting_bytes", waiting, slots.waiting_bytes.taken)
    gauge("requests_waiting_bytes_limit", limit, slots.waiting_bytes.limit)
    help_text = "Requests that ended, by route and status."
    families.family(CounterMetricFamily, "requests", help_text, "route", "status")
    for (route, status), count in answered.items():
        families.counter("requests", help_text, count, route=route, status=str(status))


def _add_keys(families: MetricFamilies, usage: KeyUsage) -> None:
    prompt, generated = "Prompt tokens of a key's answers.", "Tokens generated for a key."
    families.family(CounterMetricFamily, "key_prompt_tokens", prompt, "key", "model_name")
    families.family(CounterMetricFamily, "key_generation_tokens", generated, "key", "model_name")
    for key, model, prompt_tokens, generation_tokens in usage:
        labels = {"key": key, "model_name": model}
        families.counter("key_prompt_tokens", prompt, prompt_tokens, **labels)
        families.counter("key_generation_tokens", generated, generation_tokens, **labels)


def _add_files(families: MetricFamilies, files: FileStore) -> None:
    gauge = families.gauge
    gauge("stored_files", "Uploaded files.", len(files))
    gauge("stored_files_size_bytes", "Size of uploaded files.", files.size_bytes)
    gauge("stored_files_limit_bytes", "Limit on it: `files.max_bytes`.", files.limit_bytes)
    help_text = "Uploaded files dropped for lack of room."
    families.counter("stored_files_evictions", help_text, files.num_evicted)


def _add_batches(families: MetricFamilies, lane: Lane) -> None:
    gauge = families.gauge
    gauge("batches_active", "Batches that have not ended.", lane.num_active)
    gauge("batch_lines_running", "Lines of batches that run.", lane.num_running)
    for end, count in lane.lines.items():
        families.counter("batch_lines", "Lines of batches that ended, by how.", count, end=end)
    why = "1 for the reason for which no line is begun."
    for reason in PAUSES:
        gauge("batches_paused", why, int(reason == lane.paused), reason=reason)


def _add_stored(families: MetricFamilies, stored: ResponseStoreSize) -> None:
    gauge = families.gauge
    size, limit = "Size of these, with their turns.", "Its limit: `server.max_responses_bytes`."
    evictions = "Responses that were dropped for want of room."
    gauge("stored_responses", "Responses that clients may go on from.", len(stored))
    gauge("stored_responses_size_bytes", size, stored.size_bytes)
    gauge("stored_responses_limit_bytes", limit, stored.limit_bytes)
    families.counter("stored_responses_evictions", evictions, stored.num_evicted)


def _add_streams(families: MetricFamilies, logs: EventLogs) -> None:
    gauge, counter = families.gauge, families.counter
    size, limit = "Size of their events.", "Its limit: `server.max_stream_resume_bytes`."
    abandoned = "Resumable streams that were given up: their clients did not come back."
    gauge("resumable_streams", "Streams that clients may resume.", len(logs))
    gauge("resumable_streams_size_bytes", size, logs.size_bytes)
    gauge("resumable_streams_limit_bytes", limit, logs.limit_bytes)
    counter("resumed_streams", "Streams that clients resumed.", logs.num_resumed)
    counter("abandoned_streams", abandoned, logs.num_abandoned)


def _add_documents(families: MetricFamilies, documents: Documents) -> None:
    counter, cache, counts = families.counter, documents.cache, documents.counts
    cached = "Of these, those that were drawn for an earlier request."
    counter("documents", "Documents of requests.", counts.documents)
    counter("document_pages", "Pages of these that were read.", counts.pages)
    counter("cached_document_pages", cached, counts.cached_pages)
    counter("document_draw_seconds", "Time spent drawing pages.", counts.seconds)
    size, limit = "Size of the drawn pages that are kept.", "Its limit: `document.max_cache_bytes`."
    families.gauge("document_cache_size_bytes", size, cache.size_bytes)
    families.gauge("document_cache_limit_bytes", limit, cache.limit_bytes)


def _add_watches(families: MetricFamilies, watches: WatchFigures) -> None:
    gauge, counter = families.gauge, families.counter
    fates = "Frames given to watches, by what became of them."
    device = "Time of watches' questions on the device, with waits for it."
    gauge("watches", "Watches that are open.", len(watches))
    gauge("watches_size_bytes", "Size of the frames that they keep.", watches.size_bytes)
    families.family(CounterMetricFamily, "watch_frames", fates, "fate")
    for fate in ("asked", "unchanged", "skipped", "failed"):
        count = watches.frames[fate]
        counter("watch_frames", fates, count, fate=fate)
    counter("watch_answers", "Changed answers that watches reported.", watches.total_answers)
    counter("watch_device_seconds", device, watches.device_seconds)


def _add_answers(families: MetricFamilies, model: str, metrics: ModelMetrics) -> None:
    """Add the histograms of answers, under vLLM's names where vLLM has them."""
    phases = {
        "queue": "Until the device begins with a request, without its preparation.",
        "prepare": "Template, tokenizer, and the decoding of pictures and videos.",
        "encode": "From the first picture's encoding to the last's, of requests that need it.",
        "prefill": (
            "From the first chunk of a prompt, or its pictures' encoding, to the first token."
        ),
        "decode": "From the first token to the last.",
    }
    first = "From the request's headers to the first text of its answer."
    silence = "The longest time between two deltas of a stream."
    last = "From the request's headers to the last byte of its answer."
    inference = "From when the device begins with a request to the last token."
    image = "Tokens of a prompt's pictures, of prompts that have some."
    add = partial(families.histogram, model_name=model)
    add("time_to_first_token_seconds", first, metrics.time_to_first_token)
    between = "Between two deltas of a choice."
    add("inter_token_latency_seconds", between, metrics.inter_token_latency)
    add("stream_longest_silence_seconds", silence, metrics.longest_silence)
    add("e2e_request_latency_seconds", last, metrics.latency)
    add("request_inference_time_seconds", inference, metrics.inference)
    add("request_prompt_tokens", "Tokens of a prompt.", metrics.prompt_tokens)
    add("request_generation_tokens", "Tokens of an answer.", metrics.generation_tokens)
    add("request_image_tokens", image, metrics.image_tokens)
    for phase, histogram in metrics.phases.items():
        add(f"request_{phase}_time_seconds", phases[phase], histogram)
    gauge = partial(families.gauge, model_name=model)
    running = "Requests that the device has begun with."
    gauge("num_requests_running", running, metrics.num_running)
    gauge("num_requests_waiting", "Requests that it has not begun with.", metrics.num_waiting)
    counter, help_text = partial(families.counter, model_name=model), "Requests that ended, by why."
    for reason, count in metrics.ended.items():
        counter("request_success", help_text, count, finished_reason=reason)


def _add_engine(families: MetricFamilies, status: EngineStatus) -> None:
    """Add the metrics of a model's engine; without `Stats`, only those of the process."""
    gauge = partial(families.gauge, model_name=status.model_name)
    counter = partial(families.counter, model_name=status.model_name)
    shapes = "Sizes of requests that are refused because engines crashed on them."
    refusals = "Requests refused because engines crashed on their size."
    gauge("engine_up", "Whether an engine process is running.", status.pid is not None)
    gauge("engine_ready", "Whether requests are accepted.", status.is_ready)
    gauge("quarantined_shapes", shapes, status.quarantined_shapes)
    counter("engine_restarts", "Restarts of the engine process.", status.restarts)
    counter("quarantine_refusals", refusals, status.quarantine_refusals)
    if status.stats is not None:
        _add_requests(families, status.model_name, status.stats)
        _add_memory(families, status.model_name, status.stats)
        for cache in status.stats.caches:
            _add_cache(families, status.model_name, cache)


def _add_requests(families: MetricFamilies, model: str, stats: Stats) -> None:
    gauge = partial(families.gauge, model_name=model)
    counter = partial(families.counter, model_name=model)
    for state, count in stats.requests.items():
        gauge("engine_requests", "Requests in the engine, by state.", count, state=state)
    gauge("engine_tracked_requests", "Requests in the engine.", stats.tracked)
    tracked = "Requests that a part of the engine keeps state for; 0 when idle."
    for who, count in stats.tracked_by.items():
        gauge("engine_tracked", tracked, count, who=who)
    queries = "Prompt tokens looked up in the cache."
    hits = "Prompt tokens found in the prefix cache."
    media, cached = "Pictures and parts of videos in prompts.", "Of these, those not encoded anew."
    accepted = "Draft tokens that are part of answers."
    counter("generation_tokens", "Generated tokens.", stats.generated_tokens)
    counter("prompt_tokens", "Prompt tokens, cached ones too.", stats.prompt_tokens)
    counter("prefix_cache_queries", queries, stats.prompt_tokens)
    counter("prefix_cache_hits", hits, stats.cached_tokens)
    counter("mm_cache_queries", media, stats.media_items)
    counter("mm_cache_hits", cached, stats.cached_media_items)
    counter("tool_calls", "Complete tool calls.", stats.tool_calls)
    counter("broken_tool_calls", "Calls sent as text, or cut off.", stats.broken_tool_calls)
    counter("spec_decode_num_drafts", "Drafts verified.", stats.spec_drafts)
    counter("spec_decode_num_draft_tokens", "Tokens of drafts.", stats.spec_draft_tokens)
    counter("spec_decode_num_accepted_tokens", accepted, stats.spec_accepted_tokens)
    trained, num_trained = "Of draft tokens, a drafter's.", stats.spec_trained_draft_tokens
    counter("spec_decode_num_trained_draft_tokens", trained, num_trained)
    accepted, num_trained = "Of these, accepted ones.", stats.spec_trained_accepted_tokens
    counter("spec_decode_num_trained_accepted_tokens", accepted, num_trained)


def _add_memory(families: MetricFamilies, model: str, stats: Stats) -> None:
    gauge, memory = partial(families.gauge, model_name=model), stats.memory
    counter = partial(families.counter, model_name=model)
    baseline = "Device memory in use without requests."
    footprint = "The engine process, as the system counts it."
    used = "GPU memory in use by all programs."
    usage = "Part of the memory beside the weights that is in use by requests; 1 is all."
    gauge("memory_active_bytes", "Device memory in use by arrays.", memory.active_bytes)
    gauge("memory_pool_bytes", "Freed device memory kept for reuse.", memory.pool_bytes)
    gauge("memory_peak_bytes", "Peak device memory.", memory.peak_bytes)
    gauge("memory_limit_bytes", "Limit on device memory.", memory.limit_bytes)
    gauge("memory_baseline_bytes", baseline, memory.baseline_bytes)
    gauge("memory_footprint_bytes", footprint, memory.footprint_bytes)
    gauge("memory_device_used_bytes", used, memory.device_used_bytes)
    gauge("kv_cache_usage_perc", usage, _memory_usage(stats))
    for kind, count in memory.decisions.items():
        counter("memory_decisions", "Actions of the memory governor, by kind.", count, kind=kind)
    counter("memory_clear_seconds", "Time spent releasing the pool.", memory.clear_seconds)


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
    gauge("cache_size_bytes", "Size of a cache.", cache.size_bytes)
    gauge("cache_pinned_bytes", "Bytes in use by requests.", cache.pinned_bytes)
    gauge("cache_limit_bytes", "Largest size of a cache.", cache.limit_bytes)
    gauge("cache_entries", "Entries of a cache.", cache.entries)
    counter("cache_hits", "Lookups that hit.", cache.hits)
    counter("cache_misses", "Lookups that missed.", cache.misses)
    counter("cache_evictions", "Evicted entries.", cache.evictions)
    counter("cache_damaged", "Damaged entries, which were deleted.", cache.damaged)
