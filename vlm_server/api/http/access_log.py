"""One log line for each request: method, route, status, times and counts. Never its content."""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.routing import Route
from starlette.types import Scope

from vlm_server.api.http.connection.exchange import RECEIVED_AT
from vlm_server.api.http.recorder import AnswerRecorder
from vlm_server.api.parsing.ignored_fields import MAX_NAMES, safe_name
from vlm_server.errors import RequestError
from vlm_server.platform import log_lines
from vlm_server.platform.log_lines import Fields

logger = logging.getLogger("vlm_server.api")

AnsweredRequests = Counter[tuple[str, int]]
"""The number of requests that ended, by route as declared (never a path) and status."""

CLIENT_GONE = 499
_SCOPE_KEY = "vlm_server.access_log"
_LOOK_HEADER = b"x-vlm-look"
"""Of requests with which the page and our commands look for news: only failures are logged."""
_PREVIEW = "/v1/documents/pages"
_FRAMES = "/v1/watch/{watch_id}/frames"
_UNLOGGED = ("/health", "/ping", "/metrics", "/v1/status", "/v1/log", "/page/", _FRAMES)
"""Starts of routes that are polled or sent many times: probes, scrapes, the page, frames."""


@dataclass(slots=True)
class Entry:
    """The log line of one request: filled in while it is answered, written when it ends."""

    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    received_at: float = field(default_factory=time.monotonic)
    """The monotonic time at which all headers had arrived."""
    state: Literal["reading", "waiting_for_model", "sent"] = "reading"
    """The state of a request for an engine, until the engine reports one."""
    status: int = 0
    model: str = ""
    dialect: str = ""
    """The name of the dialect whose endpoint answers."""
    images: int = 0
    videos: int = 0
    documents: int = 0
    pages: int = 0
    """Pages of documents, which are not among `images`."""
    error_code: str | None = None
    error_param: str | None = None
    """The field at fault."""
    key_name: str | None = None
    """The name of the API key, never the key."""
    ignored: tuple[str, ...] = ()
    """The names of fields of the body without effect."""
    routing_key: str = ""
    """The key of the conversation (`parsing.routing_key`), for the client alone, never logged."""
    answer: AnswerRecorder | None = None
    """Set once the engine gets the request."""

    @property
    def ignored_names(self) -> list[str]:
        """`ignored`, made safe for a header and for the log."""
        return [safe_name(name) for name in self.ignored[:MAX_NAMES]]

    def fail(self, error: RequestError) -> None:
        """Note why the request fails. Messages are not logged: they may quote the client."""
        self.error_code = error.code
        self.error_param = safe_name(error.param) if error.param else None

    def fields(self, method: str, route: str) -> Fields:
        """The fields of the line; times in milliseconds, None for unknown values."""
        answer = self.answer
        usage = None if answer is None else answer.usage
        first_at = None if answer is None else answer.first_at
        return {
            "method": method,
            "route": route,
            "id": self.request_id,
            "status": self.status,
            "model": self.model or None,
            "finish": (answer.reason or None) if answer is not None else None,
            "ms": _milliseconds(time.monotonic() - self.received_at),
            "ttft_ms": None if first_at is None else _milliseconds(first_at - self.received_at),
            "queue_ms": _queue_milliseconds(answer),
            "prompt_tokens": 0 if usage is None else usage.prompt_tokens,
            "cached_tokens": 0 if usage is None else usage.cached_tokens,
            "tokens": 0 if usage is None else usage.completion_tokens,
            "images": self.images,
            "videos": self.videos,
            "documents": self.documents,
            "pages": self.pages,
            "error": self.error_code,
            "param": self.error_param,
            "key": self.key_name,
            "ignored": ",".join(self.ignored_names) or None,
        }

    def log(self, scope: Scope) -> None:
        """Write the line of the request of `scope`, unless it is one of many that look for news."""
        method, route = scope["method"], route_of(scope)
        is_unlogged = self._is_look(scope, route) or route == "/" or route.startswith(_UNLOGGED)
        if not is_unlogged and logger.isEnabledFor(logging.INFO):
            fields = self.fields(method, route)
            log_lines.log_fields(logger, logging.INFO, fields, summary(fields))

    def _is_look(self, scope: Scope, route: str) -> bool:
        """Whether a client says that it only looked, as it did, and nothing failed."""
        only_reads = scope["method"] in ("GET", "HEAD") or route == _PREVIEW
        has_worked = 0 < self.status < 400 and self.error_code is None and self.answer is None
        says_so = any(name == _LOOK_HEADER for name, _ in scope["headers"])
        return only_reads and has_worked and says_so


def attach(scope: Scope) -> Entry:
    """A new entry for the request of `scope`."""
    received_at = scope.get(RECEIVED_AT)
    entry = Entry() if received_at is None else Entry(received_at=received_at)
    scope[_SCOPE_KEY] = entry
    return entry


def entry_of(scope: Scope) -> Entry:
    """The entry that `attach` made for the request of `scope`."""
    entry = scope[_SCOPE_KEY]
    assert isinstance(entry, Entry)
    return entry


def route_of(scope: Scope) -> str:
    """The route as declared, never the path: a client could make up any number of paths."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else "(no route)"


def _milliseconds(seconds: float) -> int:
    return round(1e3 * seconds)


def _queue_milliseconds(answer: AnswerRecorder | None) -> int | None:
    if answer is None or not answer.timeline.phases:
        return None
    return _milliseconds(answer.phase_seconds()["queue"])


# ---- a request's line --------------------------------------------------------------------


_CLIENT_GONE = 499
_MINUTE = 60_000
_MAX_PLACE_CHARS = 60
_MEDIA = (("images", "picture"), ("videos", "video"), ("documents", "document"))


def summary(fields: Fields) -> str:
    """The line of a request with these fields (`access_log.Entry.fields`)."""
    return "  ".join(part for part in _parts(dict(fields)) if part)


def _parts(fields: dict[str, Any]) -> Iterator[str]:
    yield fields["model"] or f"{fields['method']} {fields['route']}"
    yield _tokens(fields)
    yield ", ".join(_count(fields[name], noun) for name, noun in _MEDIA if fields[name])
    yield _failure(fields)
    yield duration(fields["ms"])
    yield f"key {fields['key']}" if fields["key"] else ""


def _tokens(fields: dict[str, Any]) -> str:
    prompt, written = fields["prompt_tokens"], fields["tokens"]
    if not prompt:
        return ""
    notes = [f"{fields['cached_tokens']} cached"] if fields["cached_tokens"] else []
    notes += ["cut off"] if fields["finish"] == "length" else []
    text = f"{prompt} → {written} tokens" if written else _count(prompt, "token")
    return f"{text} ({', '.join(notes)})" if notes else text


def _failure(fields: dict[str, Any]) -> str:
    """What went wrong: the error's code as words, and the field at fault."""
    code, status = fields["error"], fields["status"]
    if code is None:
        is_gone = status == _CLIENT_GONE or fields["finish"] == "abort"
        return "the client left" if is_gone else ""
    place, number = fields["param"] or "", f" ({status})" if status >= 400 else ""
    if code.startswith(place):  # `model not found` names the field
        place = ""
    if len(place) > _MAX_PLACE_CHARS:
        place = f"{place[:_MAX_PLACE_CHARS]}…"
    return f"failed: {code.replace('_', ' ')}{' in ' if place else ''}{place}{number}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration(milliseconds: int) -> str:
    """A time for people: `3 ms`, `0.74 s`, `12.3 s`, `2 min 5 s`."""
    if milliseconds < 100:
        return f"{milliseconds} ms"
    if milliseconds < _MINUTE:
        return f"{milliseconds / 1000:.{2 if milliseconds < 9_995 else 1}f} s"
    minutes, rest = divmod(round(milliseconds / 1000), 60)
    return f"{minutes} min {rest} s"
