"""One log line for each request: method, route, status, times and counts. Never its content."""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field

from starlette.types import Scope

from vlm_server.api.http.intake.leniency import MAX_NAMES, safe_name

logger = logging.getLogger("vlm_server.api")

AnsweredRequests = Counter[tuple[str, int]]
"""Number of requests that ended, by route as it is declared (never a path) and status."""

CLIENT_GONE = 499
_SCOPE_KEY = "vlm_server.access_log"
_PROBED = ("/health", "/metrics", "/v1/status", "/page/")


@dataclass(slots=True)
class Entry:
    """Filled in while a request is answered; logged once, when it ends.

    `key_name` is the name of the API key, never the key; `ignored` are the names of fields of the
    body that had no effect.
    """

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    ttft_seconds: float | None = None
    completion_tokens: int = 0
    images: int = 0
    videos: int = 0
    error_code: str | None = None
    key_name: str | None = None
    ignored: tuple[str, ...] = ()

    @property
    def ignored_names(self) -> list[str]:
        """`ignored`, whoever collected it, fit for a header and for the log."""
        return [safe_name(name) for name in self.ignored[:MAX_NAMES]]

    def first_text(self) -> None:
        """Note the time to first token; later calls do nothing."""
        if self.ttft_seconds is None:
            self.ttft_seconds = time.perf_counter() - self.started

    def log(self, method: str, route: str) -> None:
        """Write the line; at debug level for what comes often: probes, scrapes, the page."""
        level = logging.DEBUG if route.startswith(_PROBED) else logging.INFO
        ttft = "-" if self.ttft_seconds is None else f"{self.ttft_seconds * 1e3:.0f}"
        logger.log(
            level,
            "%s %s id=%s status=%d ms=%.0f ttft_ms=%s tokens=%d images=%d videos=%d error=%s "
            "key=%s ignored=%s",
            method,
            route,
            self.request_id,
            self.status,
            (time.perf_counter() - self.started) * 1e3,
            ttft,
            self.completion_tokens,
            self.images,
            self.videos,
            self.error_code or "-",
            self.key_name or "-",
            ",".join(self.ignored_names) or "-",
        )


def attach(scope: Scope) -> Entry:
    """A new entry for the request of `scope`."""
    entry = scope[_SCOPE_KEY] = Entry()
    return entry


def of(scope: Scope) -> Entry:
    """The entry that `attach` made for the request of `scope`."""
    entry = scope[_SCOPE_KEY]
    assert isinstance(entry, Entry)
    return entry
