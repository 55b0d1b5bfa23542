"""What the log line of one request says. Knows numbers and names; knows no payload."""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass, field

from starlette.types import Scope

logger = logging.getLogger("vlm_server.api")

CLIENT_GONE = 499
_SCOPE_KEY = "vlm_server.record"
_LOOKERS = ("/health", "/metrics", "/v1/status")


@dataclass(slots=True)
class Record:
    """Filled in while a request is answered, logged once at its end."""

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: float = field(default_factory=time.perf_counter)
    status: int = 0
    ttft_seconds: float | None = None
    completion_tokens: int = 0
    images: int = 0
    videos: int = 0
    error_code: str | None = None

    def first_text(self) -> None:
        if self.ttft_seconds is None:
            self.ttft_seconds = time.perf_counter() - self.started

    def log(self, method: str, route: str) -> None:
        """One line; those who only look are not worth more than the debug level."""
        level = logging.DEBUG if route.startswith(_LOOKERS) else logging.INFO
        ttft = "-" if self.ttft_seconds is None else f"{self.ttft_seconds * 1e3:.0f}"
        logger.log(
            level,
            "%s %s id=%s status=%d ms=%.0f ttft_ms=%s tokens=%d images=%d videos=%d error=%s",
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
        )


def attach(scope: Scope) -> Record:
    """A new record, for whoever answers the request of `scope`."""
    record = scope[_SCOPE_KEY] = Record()
    return record


def of(scope: Scope) -> Record:
    record = scope[_SCOPE_KEY]
    assert isinstance(record, Record)
    return record
