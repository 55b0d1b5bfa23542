"""The figures of the scheduler for status and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlm_server.engine.request.request import Request
from vlm_server.protocol import CacheStats, RequestProgress


@dataclass(slots=True)
class SpecCounts:
    """Counts of draft tokens.

    num_drafts: drafts that steps verified, one for each sequence that had any. num_accepted_tokens:
    of their tokens, those that are part of answers.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def add(self, num_tokens: int, num_accepted: int) -> None:
        """Count one draft of `num_tokens`."""
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.num_accepted_tokens += num_accepted


@dataclass(slots=True)
class Counts:
    """Counts since the last `reset_stats`.

    Tool calls are those of requests that have ended.
    """

    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tool_calls: int = 0
    num_broken_tool_calls: int = 0
    num_media: int = 0
    num_cached_media: int = 0
    spec: SpecCounts = field(default_factory=SpecCounts)

    def add_started(self, request: Request) -> None:
        """Count a request whose prefill begins."""
        num_media = len(request.prompt.spans)
        self.num_prompt_tokens += request.prompt.num_tokens
        self.num_cached_tokens += request.num_cached_tokens
        self.num_media += num_media
        self.num_cached_media += num_media - request.num_encoded

    def add_ended(self, request: Request) -> None:
        """Count a request that has ended, however."""
        for choice in request.choices:
            self.num_tool_calls += choice.num_tool_calls
            self.num_broken_tool_calls += choice.num_broken_tool_calls


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A reading of the scheduler for `/v1/status` and `/metrics`.

    requests: how many there are in each live state. max_num_seqs: how many sequences may decode
    together. num_tracked: everything that is remembered of any request; 0 when idle.
    """

    requests: dict[str, int]
    num_tracked: int
    counts: Counts
    caches: tuple[CacheStats, ...]
    progress: tuple[RequestProgress, ...]
    max_num_seqs: int
