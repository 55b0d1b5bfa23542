"""The requests that hold a queue slot, for operators: the state of each, never its content."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.routing import Route
from starlette.types import Scope

from vlm_server.api.http import access_log
from vlm_server.api.http.access_log import Entry
from vlm_server.protocol import RequestProgress

_READING, _WAITING, _SENT = "reading", "waiting_for_model", "sent"
"""States before the engine's first report of a request: its body is parsed, its model is loaded, it
is on its way."""


@dataclass(slots=True)
class _Tracked:
    entry: Entry
    route: str
    state: str = _READING


class RequestsInFlight:
    """Requests in flight, by the ids that the engine knows. Used from the event loop only."""

    def __init__(self) -> None:
        self._requests: dict[str, _Tracked] = {}

    @contextmanager
    def track(self, request_id: str, scope: Scope) -> Iterator[None]:
        """List the request of `scope` during the `with` block."""
        route = scope.get("route")
        path = route.path if isinstance(route, Route) else ""
        self._requests[request_id] = _Tracked(access_log.of(scope), path)
        try:
            yield
        finally:
            del self._requests[request_id]

    def mark_read(self, request_id: str) -> None:
        """The request's body was parsed; it waits for its model."""
        self._requests[request_id].state = _WAITING

    def mark_sent(self, request_id: str) -> None:
        """The request is sent to the engine."""
        self._requests[request_id].state = _SENT

    def to_json(self, progress: Sequence[RequestProgress]) -> list[dict[str, Any]]:
        """The list in `/v1/status`; `progress` is what the engine reported last."""
        told = {each.request_id: each for each in progress}
        now = time.monotonic()
        return [_shown(name, each, told.get(name), now) for name, each in self._requests.items()]


def _shown(
    request_id: str, tracked: _Tracked, told: RequestProgress | None, now: float
) -> dict[str, Any]:
    entry = tracked.entry
    first_at = None if entry.answer is None else entry.answer.first_at
    return {
        "id": request_id,
        "route": tracked.route,
        "model": entry.model or None,
        "key": entry.key_name,
        "state": told.state if told else tracked.state,
        "done": told.done if told else 0,
        "total": told.total if told else 0,
        "images": entry.images,
        "videos": entry.videos,
        "seconds": round(now - entry.received_at, 3),
        "first_token_seconds": None if first_at is None else round(first_at - entry.received_at, 3),
    }
