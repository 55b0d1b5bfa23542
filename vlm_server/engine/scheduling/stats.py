"""What is shown of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from vlm_server.protocol import CacheStats, RequestProgress


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """What `/v1/status` and `/metrics` show of the scheduler.

    requests: how many there are in each live state. max_num_seqs: how many sequences may decode
    together. num_tracked: everything that is remembered of
    any request; 0 when idle. The other counts are since the last `reset_stats`; those of tool
    calls are of requests that have ended.
    """

    requests: dict[str, int]
    num_tracked: int
    num_generated_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tool_calls: int
    num_broken_tool_calls: int
    num_media: int
    num_cached_media: int
    caches: tuple[CacheStats, ...]
    progress: tuple[RequestProgress, ...]
    max_num_seqs: int
