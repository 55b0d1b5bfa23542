"""What is shown of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from vlm_server.protocol import CacheStats, RequestProgress


@dataclass(slots=True)
class SpecCounts:
    """What became of draft tokens.

    num_drafts: drafts that steps verified, one for each sequence that had any. num_accepted_tokens:
    of their tokens, those that are part of answers.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def note(self, num_tokens: int, num_accepted: int) -> None:
        """One draft of so many tokens."""
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.num_accepted_tokens += num_accepted


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
    spec: SpecCounts
    progress: tuple[RequestProgress, ...]
    max_num_seqs: int
