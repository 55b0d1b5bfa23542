"""The requests that ended last, for operators: who, when, how long and how much; never content."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from vlm_server.api.http.access_log import Entry
from vlm_server.protocol import Usage

NUM_KEPT = 50
_NO_USAGE = Usage(0, 0)


class EndedRequests:
    """The last `NUM_KEPT` requests to generating `routes`."""

    def __init__(self, routes: Collection[str]) -> None:
        self._routes = routes
        self._kept: deque[dict[str, Any]] = deque(maxlen=NUM_KEPT)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The last one first."""
        yield from reversed(self._kept)

    def add(self, entry: Entry, route: str) -> None:
        """Keep a request that ends now, if it is one for an answer."""
        if entry.dialect and route in self._routes:
            self._kept.append(_ended(entry, route))


def _ended(entry: Entry, route: str) -> dict[str, Any]:
    """The JSON of a request, with times in seconds; None where it did not come so far.

    finish: one of `model_metrics.REASONS`. phases: as in the header `Server-Timing`.
    """
    answer, usage = entry.answer, _NO_USAGE if entry.answer is None else entry.answer.usage
    phases = {} if answer is None else answer.phase_seconds()
    first_at = None if answer is None else answer.first_at
    return {
        "id": entry.request_id if answer is None else answer.response_id,
        "route": route,
        "dialect": entry.dialect,
        "model": entry.model or None,
        "key": entry.key_name,
        "ended_at": time.time(),
        "status": entry.status,
        "finish": (answer.reason or None) if answer is not None else None,
        "error": entry.error_code,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "tokens": usage.completion_tokens,
        "images": entry.images,
        "videos": entry.videos,
        "pages": entry.pages,
        "queue_seconds": _rounded(phases["queue"]) if answer and answer.timeline.phases else None,
        "first_token_seconds": None if first_at is None else _rounded(first_at - entry.received_at),
        "seconds": _rounded(time.monotonic() - entry.received_at),
        "phases": {name: _rounded(seconds) for name, seconds in phases.items()},
    }


def _rounded(seconds: float) -> float:
    return round(seconds, 4)
