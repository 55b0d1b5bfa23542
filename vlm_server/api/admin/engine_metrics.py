"""Metrics of an engine: its process, and its latest `protocol.Stats`."""

from __future__ import annotations

from vlm_server.api.admin.families import Families
from vlm_server.protocol import CacheStats, Stats
from vlm_server.supervisor.client import EngineStatus

_ON_DEVICE = ("encoder", "tile", "prefix")
"""The caches that hold device memory."""


def add_engine(families: Families, status: EngineStatus) -> None:
    """Add the metrics of a model's engine; without `Stats`, only those of the process."""
    model, quarantine = status.model_name, "because engines crashed on"
    families.gauges(
        (
            ("engine_up", "Whether an engine process is running.", status.pid is not None),
            ("engine_ready", "Whether requests are accepted.", status.is_ready),
            (
                "quarantined_shapes",
                f"Sizes of requests that are refused {quarantine} them.",
                status.quarantined_shapes,
            ),
        ),
        model_name=model,
    )
    families.counters(
        (
            ("engine_restarts", "Restarts of the engine process.", status.restarts),
            (
                "quarantine_refusals",
                f"Requests refused {quarantine} their size.",
                status.quarantine_refusals,
            ),
        ),
        model_name=model,
    )
    if status.stats is not None:
        _add_requests(families, model, status.stats)
        _add_tokens(families, model, status.stats)
        _add_memory(families, model, status.stats)
        for cache in status.stats.caches:
            _add_cache(families, model, cache)


def memory_usage(stats: Stats) -> float:
    """The part of the device memory beside the weights that no eviction can free, 0 to 1."""
    memory = stats.memory
    room = memory.limit_bytes - memory.baseline_bytes
    if room <= 0:
        return 0.0
    caches = [cache for cache in stats.caches if cache.name in _ON_DEVICE]
    evictable = sum(cache.size_bytes - cache.pinned_bytes for cache in caches)
    used = memory.active_bytes - memory.baseline_bytes - evictable
    return min(1.0, max(0.0, used / room))


def _add_requests(families: Families, model: str, stats: Stats) -> None:
    help_text = "Requests in the engine, by state."
    for state, count in stats.requests.items():
        families.gauge("engine_requests", help_text, count, model_name=model, state=state)
    families.gauge(
        "engine_tracked_requests", "Requests in the engine.", stats.tracked, model_name=model
    )
    help_text = "Requests that a part of the engine keeps state for; 0 when idle."
    for who, count in stats.tracked_by.items():
        families.gauge("engine_tracked", help_text, count, model_name=model, who=who)


def _add_tokens(families: Families, model: str, stats: Stats) -> None:
    accepted = "Draft tokens that are part of answers."
    families.counters(
        (
            ("generation_tokens", "Generated tokens.", stats.generated_tokens),
            ("prompt_tokens", "Prompt tokens, cached ones too.", stats.prompt_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.cached_tokens),
            ("mm_cache_queries", "Pictures and parts of videos in prompts.", stats.media_items),
            ("mm_cache_hits", "Of these, those not encoded anew.", stats.cached_media_items),
            ("tool_calls", "Complete tool calls.", stats.tool_calls),
            ("broken_tool_calls", "Calls sent as text, or cut off.", stats.broken_tool_calls),
            ("spec_decode_num_drafts", "Drafts verified.", stats.spec_drafts),
            ("spec_decode_num_draft_tokens", "Tokens of drafts.", stats.spec_draft_tokens),
            ("spec_decode_num_accepted_tokens", accepted, stats.spec_accepted_tokens),
        ),
        model_name=model,
    )


def _add_memory(families: Families, model: str, stats: Stats) -> None:
    memory = stats.memory
    baseline = "Device memory in use without requests."
    footprint = "The engine process, as the system counts it."
    used = "GPU memory in use by all programs."
    usage = "Part of the memory beside the weights that is in use by requests; 1 is all."
    families.gauges(
        (
            ("memory_active_bytes", "Device memory in use by arrays.", memory.active_bytes),
            ("memory_pool_bytes", "Freed device memory kept for reuse.", memory.pool_bytes),
            ("memory_peak_bytes", "Peak device memory.", memory.peak_bytes),
            ("memory_limit_bytes", "Limit on device memory.", memory.limit_bytes),
            ("memory_baseline_bytes", baseline, memory.baseline_bytes),
            ("memory_footprint_bytes", footprint, memory.footprint_bytes),
            ("memory_device_used_bytes", used, memory.device_used_bytes),
            ("kv_cache_usage_perc", usage, memory_usage(stats)),
        ),
        model_name=model,
    )
    help_text = "Actions of the memory governor, by kind."
    for kind, count in memory.decisions.items():
        families.counter("memory_decisions", help_text, count, model_name=model, kind=kind)
    help_text = "Time spent releasing the pool."
    families.counter("memory_clear_seconds", help_text, memory.clear_seconds, model_name=model)


def _add_cache(families: Families, model: str, cache: CacheStats) -> None:
    labels = {"model_name": model, "cache": cache.name}
    families.gauges(
        (
            ("cache_size_bytes", "Size of a cache.", cache.size_bytes),
            ("cache_pinned_bytes", "Bytes in use by requests.", cache.pinned_bytes),
            ("cache_limit_bytes", "Largest size of a cache.", cache.limit_bytes),
            ("cache_entries", "Entries of a cache.", cache.entries),
        ),
        **labels,
    )
    families.counters(
        (
            ("cache_hits", "Lookups that hit.", cache.hits),
            ("cache_misses", "Lookups that missed.", cache.misses),
            ("cache_evictions", "Evicted entries.", cache.evictions),
            ("cache_damaged", "Damaged entries, which were deleted.", cache.damaged),
        ),
        **labels,
    )
