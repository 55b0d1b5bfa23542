"""What a silent stream sends: keep-alives, or comments on its request's progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from vlm_server.api.http.access_log import Entry, entry_of
from vlm_server.api.http.dialect import Dialect, Renderer
from vlm_server.api.http.streams import sse
from vlm_server.settings import Server
from vlm_server.supervisor.engine_process.client import ModelClient

PROGRESS_HEADER = "X-VLM-Progress"
"""Asks for comments on progress. Other servers, and streams that are not of events, ignore it."""
_PROGRESS_SECONDS = 0.5
"""Silence before a comment on progress. Engines report once a second."""

KeepAlive = Callable[[], bytes] | None


class KeepAlives:
    """What the stream of one request may send while it is silent; `request_id` is the engine's."""

    def __init__(
        self,
        models: ModelClient,
        in_flight: Mapping[str, Scope],
        dialect: Dialect,
        render: Renderer,
        entry: Entry,
        request_id: str,
    ) -> None:
        self._models = models
        self._in_flight = in_flight
        self._is_sse = dialect.content_type == sse.CONTENT_TYPE
        self._render = render
        self._entry = entry
        self._request_id = request_id

    def of(self, headers: Headers, server: Server) -> tuple[KeepAlive, float]:
        """What is sent, None if nothing, and after how many seconds. Raises InvalidRequest."""
        seconds = server.stream_keepalive_seconds
        if headers.get(PROGRESS_HEADER) and self._is_sse:
            return self._progress, min(seconds, _PROGRESS_SECONDS)
        signs: dict[str, KeepAlive] = {
            "comment": self._comment,
            "empty_chunk": self._render.empty_chunk,
            "off": None,
        }
        return signs[sse.keepalive_of(headers, server)], seconds

    def _progress(self) -> bytes:
        """A comment with the request's `state` and token counts, or its model's loading."""
        status = self._models.status(self._entry.model)
        reports = () if status.stats is None else status.stats.progress
        report = next((one for one in reports if one.request_id == self._request_id), None)
        state: dict[str, Any]
        if status.progress is not None:
            stage, fraction = status.progress
            state = {"state": "waiting_for_model", "stage": stage, "fraction": fraction}
        elif report is None:
            state = {"state": self._entry.state, "ahead": self._num_ahead()}
        else:
            counts = {"done": report.done, "total": report.total}
            state = {"state": report.state, **counts, "ahead": self._num_ahead()}
        return sse.comment(f"progress {msgspec.json.encode(state).decode()}")

    def _num_ahead(self) -> int:
        """How many requests to the same model came earlier and have no token yet."""
        mine = self._entry
        return sum(
            other.model == mine.model
            and other.received_at < mine.received_at
            and (other.answer is None or other.answer.first_at is None)
            for other in map(entry_of, self._in_flight.values())
        )

    def _comment(self) -> bytes:
        """A keep-alive; in an SSE stream with a comment on the progress of loading the model."""
        status = self._models.status(self._entry.model)
        if status.progress is None or not self._is_sse:
            return self._render.keep_alive()
        stage, fraction = status.progress
        return sse.comment(f"{status.state}: {stage} ({fraction:.0%})") + self._render.keep_alive()
