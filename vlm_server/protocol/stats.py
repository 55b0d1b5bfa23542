"""An engine's report of itself, sent about once a second while it changes."""

from __future__ import annotations

import msgspec


class CacheStats(msgspec.Struct, frozen=True):
    """One cache: sizes in bytes, counters since the engine's start.

    `pinned_bytes` are in use by requests and can't be evicted. A hit of the prefix cache is a
    prompt of which at least one token was found. `damaged` entries were deleted, not used.
    """

    name: str
    entries: int
    size_bytes: int
    pinned_bytes: int
    limit_bytes: int
    hits: int
    misses: int
    evictions: int
    damaged: int = 0


class MemoryStats(msgspec.Struct, frozen=True):
    """Device memory, in bytes, and what was done about it since the engine's start.

    `baseline_bytes` are held without any request: weights. `reserved_bytes` are what running
    requests may still take. `footprint_bytes` is what the system counts for the process,
    `device_used_bytes` what the device's driver counts for all programs (0 where the device is the
    machine itself). `decisions` counts by kind: `clear_` and a reason, `evict`, `wait` (requests
    that waited for memory), `refuse`.
    """

    active_bytes: int
    pool_bytes: int
    peak_bytes: int
    limit_bytes: int
    baseline_bytes: int
    footprint_bytes: int
    device_used_bytes: int
    decisions: dict[str, int]
    clear_seconds: float
    reserved_bytes: int = 0


class RequestProgress(msgspec.Struct, frozen=True):
    """The progress of one request: `state` is the name of an `engine.request.states.State`.

    `done` and `total` count tokens: in `encoding` those of its uncached media, in `prefill` those
    of the prompt, in `decode` those of all answers and their maximum. Both are 0 in other states.
    """

    request_id: str
    state: str
    done: int = 0
    total: int = 0


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """A reading of the engine, sent about once a second while it changes or has requests.

    It also serves as a heartbeat: the threads' pieces of work are numbered, and work that hangs
    keeps its number.
    """

    requests: dict[str, int]
    """Numbers of requests by state, named as in `engine.request.states.State`."""
    tracked: int
    """Number of requests that the scheduler holds."""
    tracked_by: dict[str, int]
    """Remembered items of requests, by component; all 0 when idle."""
    memory: MemoryStats
    generated_tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The part of `prompt_tokens` that the prefix cache had."""
    caches: tuple[CacheStats, ...] = ()
    at_work: dict[str, int] = {}
    """The number of the oldest piece of work of each kind of thread that has one."""
    tool_calls: int = 0
    """Complete ones, in answers that have ended."""
    broken_tool_calls: int = 0
    """Calls that were sent as text, or were cut off."""
    media_items: int = 0
    """Images and parts of videos in prompts."""
    cached_media_items: int = 0
    """The part of `media_items` that some cache had."""
    spec_drafts: int = 0
    """Sequences whose draft tokens a step verified; counted for each step."""
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    """The part of `spec_draft_tokens` that was accepted into answers."""
    spec_trained_draft_tokens: int = 0
    """The part of `spec_draft_tokens` that a trained drafter made."""
    spec_trained_accepted_tokens: int = 0
    progress: tuple[RequestProgress, ...] = ()
    """The progress of requests that have not ended, in order of arrival."""
    max_num_seqs: int = 0
    """Maximum sequences that are decoded in one step."""


ENCODER, PREPARERS = "encoder", "preparers"
"""The kinds of threads, besides the one for inference."""
