"""The figures of the scheduler for status and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from vlm_server.engine.request.request import Request
from vlm_server.protocol import CacheStats, RequestProgress


@dataclass
class SchedulerStats:
    """The scheduler's fields of `protocol.Stats`.

    The fields up to `spec_trained_accepted_tokens` are counters since `reset_stats`; those of tool
    calls count ended requests only. `Scheduler.stats` fills in the others.
    """

    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tool_calls: int = 0
    broken_tool_calls: int = 0
    media_items: int = 0
    cached_media_items: int = 0
    spec_drafts: int = 0
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    spec_trained_draft_tokens: int = 0
    spec_trained_accepted_tokens: int = 0
    requests: dict[str, int] = field(default_factory=dict)
    tracked: int = 0
    caches: tuple[CacheStats, ...] = ()
    progress: tuple[RequestProgress, ...] = ()
    max_num_seqs: int = 0

    def add_started(self, request: Request) -> None:
        """Count a request whose prefill begins."""
        num_media = len(request.prompt.spans)
        self.prompt_tokens += request.prompt.num_tokens
        self.cached_tokens += request.num_cached_tokens
        self.media_items += num_media
        self.cached_media_items += num_media - request.num_encoded

    def add_draft(self, num_tokens: int, num_accepted: int, *, is_trained: bool) -> None:
        """Count a draft that a step verified, and its tokens that are part of the answer."""
        self.spec_drafts += 1
        self.spec_draft_tokens += num_tokens
        self.spec_accepted_tokens += num_accepted
        if is_trained:
            self.spec_trained_draft_tokens += num_tokens
            self.spec_trained_accepted_tokens += num_accepted

    def add_ended(self, request: Request) -> None:
        """Count a request that has ended, however."""
        for choice in request.choices:
            self.tool_calls += choice.num_tool_calls
            self.broken_tool_calls += choice.num_broken_tool_calls
