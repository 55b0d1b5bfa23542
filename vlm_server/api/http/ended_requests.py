"""The requests that ended last, for operators: who, when, how long and how much; never content."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator

import msgspec

from vlm_server.api.http.access_log import Entry
from vlm_server.protocol import Usage

NUM_KEPT = 50
_NO_USAGE = Usage(0, 0)


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request that has ended. Times in seconds; None where it did not come so far."""

    id: str
    route: str
    dialect: str
    model: str | None
    key: str | None
    """The name of the API key."""
    ended_at: float
    """Seconds since 1970."""
    status: int
    finish: str | None
    """One of `model_metrics.REASONS`; None if the engine did not get it."""
    error: str | None
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    images: int
    videos: int
    pages: int
    queue_seconds: float | None
    first_token_seconds: float | None
    seconds: float
    phases: dict[str, float]
    """Seconds by phase, as in the header `Server-Timing`."""


class EndedRequests:
    """The last `NUM_KEPT` requests to generating `routes`."""

    def __init__(self, routes: Collection[str]) -> None:
        self._routes = routes
        self._kept: deque[EndedRequest] = deque(maxlen=NUM_KEPT)

    def __iter__(self) -> Iterator[EndedRequest]:
        """The last one first."""
        return reversed(self._kept)

    def add(self, entry: Entry, route: str) -> None:
        """Keep a request that ends now, if it is one for an answer."""
        if entry.dialect and route in self._routes:
            self._kept.append(_ended(entry, route))


def _ended(entry: Entry, route: str) -> EndedRequest:
    answer, usage = entry.answer, _NO_USAGE if entry.answer is None else entry.answer.usage
    phases = {} if answer is None else answer.phase_seconds()
    first_at = None if answer is None else answer.first_at
    return EndedRequest(
        id=entry.request_id if answer is None else answer.response_id,
        route=route,
        dialect=entry.dialect,
        model=entry.model or None,
        key=entry.key_name,
        ended_at=time.time(),
        status=entry.status,
        finish=(answer.reason or None) if answer is not None else None,
        error=entry.error_code,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        tokens=usage.completion_tokens,
        images=entry.images,
        videos=entry.videos,
        pages=entry.pages,
        queue_seconds=_rounded(phases["queue"]) if answer and answer.timeline.phases else None,
        first_token_seconds=None if first_at is None else _rounded(first_at - entry.received_at),
        seconds=_rounded(time.monotonic() - entry.received_at),
        phases={name: _rounded(seconds) for name, seconds in phases.items()},
    )


def _rounded(seconds: float) -> float:
    return round(seconds, 4)
