"""Metrics of an engine: its process, and its latest `protocol.Stats`."""

from __future__ import annotations

from vlm_server.api.admin.families import Families
from vlm_server.protocol import CacheStats, MemoryStats, Stats
from vlm_server.supervisor.client import EngineStatus

_ON_DEVICE = ("encoder", "tile", "prefix")
"""The caches that hold device memory."""


def add_engine(families: Families, status: EngineStatus) -> None:
    """All of one model's engine; without `Stats` there are only those of the process."""
    model = status.model_name
    families.gauge(
        "engine_up",
        "Whether an engine process is running.",
        status.pid is not None,
        model_name=model,
    )
    families.gauge(
        "engine_ready", "Whether requests are accepted.", status.is_ready, model_name=model
    )
    families.counter(
        "engine_restarts", "Restarts of the engine process.", status.restarts, model_name=model
    )
    families.gauge(
        "quarantined_shapes",
        "Sizes of requests that are refused because engines crashed on them.",
        status.quarantined_shapes,
        model_name=model,
    )
    families.counter(
        "quarantine_refusals",
        "Requests refused because engines crashed on their size.",
        status.quarantine_refusals,
        model_name=model,
    )
    if status.stats is not None:
        _add_requests(families, model, status.stats)
        _add_tokens(families, model, status.stats)
        _add_memory(families, model, status.stats.memory)
        families.gauge(
            "kv_cache_usage_perc",
            "Part of the memory beside the weights that is in use by requests; 1 is all.",
            memory_usage(status.stats),
            model_name=model,
        )
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
    for state, count in stats.requests.items():
        families.gauge(
            "engine_requests",
            "Requests in the engine, by state.",
            count,
            model_name=model,
            state=state,
        )
    families.gauge(
        "engine_tracked_requests", "Requests in the engine.", stats.tracked, model_name=model
    )
    for who, count in stats.tracked_by.items():
        families.gauge(
            "engine_tracked",
            "Requests that a part of the engine keeps state for; 0 when idle.",
            count,
            model_name=model,
            who=who,
        )


def _add_tokens(families: Families, model: str, stats: Stats) -> None:
    for name, help_text, value in (
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
        (
            "spec_decode_num_accepted_tokens",
            "Draft tokens that are part of answers.",
            stats.spec_accepted_tokens,
        ),
    ):
        families.counter(name, help_text, value, model_name=model)


def _add_memory(families: Families, model: str, memory: MemoryStats) -> None:
    for name, help_text, value in (
        ("active_bytes", "Device memory in use by arrays.", memory.active_bytes),
        ("pool_bytes", "Freed device memory kept for reuse.", memory.pool_bytes),
        ("peak_bytes", "Peak device memory.", memory.peak_bytes),
        ("limit_bytes", "Limit on device memory.", memory.limit_bytes),
        ("baseline_bytes", "Device memory in use without requests.", memory.baseline_bytes),
        ("footprint_bytes", "The engine process, as the system counts it.", memory.footprint_bytes),
        ("device_used_bytes", "GPU memory in use by all programs.", memory.device_used_bytes),
    ):
        families.gauge(f"memory_{name}", help_text, value, model_name=model)
    for kind, count in memory.decisions.items():
        families.counter(
            "memory_decisions",
            "Actions of the memory governor, by kind.",
            count,
            model_name=model,
            kind=kind,
        )
    families.counter(
        "memory_clear_seconds",
        "Time spent releasing the pool.",
        memory.clear_seconds,
        model_name=model,
    )


def _add_cache(families: Families, model: str, cache: CacheStats) -> None:
    for name, help_text, value in (
        ("size_bytes", "Size of a cache.", cache.size_bytes),
        ("pinned_bytes", "Bytes in use by requests.", cache.pinned_bytes),
        ("limit_bytes", "Largest size of a cache.", cache.limit_bytes),
        ("entries", "Entries of a cache.", cache.entries),
    ):
        families.gauge(f"cache_{name}", help_text, value, model_name=model, cache=cache.name)
    for name, help_text, value in (
        ("hits", "Lookups that hit.", cache.hits),
        ("misses", "Lookups that missed.", cache.misses),
        ("evictions", "Evicted entries.", cache.evictions),
        ("damaged", "Damaged entries, which were deleted.", cache.damaged),
    ):
        families.counter(f"cache_{name}", help_text, value, model_name=model, cache=cache.name)
