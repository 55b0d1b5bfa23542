"""The layers around every route: access log, errors as JSON, access checks (and `access.cors`).

Each layer is plain ASGI, so that streams and disconnects pass through unchanged; every scope has
the type `http`, since the server has neither lifespan nor WebSockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlm_server.api.http import access_log, errors
from vlm_server.api.http.access import cors, gate, keys
from vlm_server.api.http.access.gate import is_page
from vlm_server.api.http.access.keys import NO_KEY, KeyRing, KeySlots
from vlm_server.api.http.access_log import AnsweredRequests
from vlm_server.api.http.body import ClientGone
from vlm_server.api.http.ended_requests import EndedRequests
from vlm_server.api.http.errors import EncodeFor
from vlm_server.api.http.model_metrics import KeyUsage
from vlm_server.api.http.queue import gaps
from vlm_server.api.http.queue.queue_slots import QueueSlots
from vlm_server.api.http.tracing import Tracer
from vlm_server.api.parsing import routing_key
from vlm_server.errors import InternalError, RequestError
from vlm_server.settings import Server
from vlm_server.supervisor.engine_process.client import ModelClient


@dataclass
class RequestLog:
    """The outermost layer: gives each request an id; logs, counts and traces it when it ends.

    Response headers: `X-Request-Id`, and `Request-Id` for Anthropic's clients; `X-VLM-Ignored`, the
    fields of the body that had no effect; `X-VLM-Routing-Key`, the key of the conversation.
    """

    app: ASGIApp
    answered: AnsweredRequests
    ended: EndedRequests
    tracer: Tracer | None
    key_usage: KeyUsage = field(default_factory=KeyUsage)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry = access_log.attach(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = headers["Request-Id"] = entry.request_id
                if entry.ignored:
                    headers["X-VLM-Ignored"] = ", ".join(entry.ignored_names)
                if entry.routing_key:
                    headers[routing_key.RESPONSE_HEADER] = entry.routing_key
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            route = access_log.route_of(scope)
            entry.log(scope)
            self.answered[route, entry.status] += 1
            self.ended.add(entry, route)
            if (answer := entry.answer) is not None:
                self.key_usage.add(entry.key_name, answer.model, answer.usage)
            if self.tracer is not None:
                self.tracer.record(entry, scope["method"], route, Headers(scope=scope))


@dataclass
class Errors:
    """Turns exceptions into responses of the dialect; a client never sees a traceback."""

    app: ASGIApp
    models: ModelClient
    queue_slots: QueueSlots
    encode_for: EncodeFor

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry = access_log.entry_of(scope)
        try:
            await self.app(scope, receive, send)
        except ClientGone:
            entry.status = access_log.CLIENT_GONE
        except RequestError as error:
            await self._answer(error, scope, receive, send)
        except Exception:
            access_log.logger.exception("id=%s failed unexpectedly", entry.request_id)
            if entry.status:  # too late for a response: close the connection
                raise
            await self._answer(InternalError("The server failed."), scope, receive, send)

    async def _answer(
        self, error: RequestError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        entry = access_log.entry_of(scope)
        entry.fail(error)
        model = entry.model or self.models.names[0]
        retry_after_seconds = max(
            self.models.status(model).retry_after_seconds, self.queue_slots.retry_after_seconds()
        )
        response = errors.response(error, self.encode_for(scope), retry_after_seconds)
        await response(scope, receive, send)


@dataclass
class Gate:
    """Refuses a wrong Host, a foreign Origin, and a missing, wrong or busy API key."""

    app: ASGIApp
    server: Server
    ring: KeyRing
    slots: KeySlots = field(default_factory=KeySlots)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if gaps.is_line(scope):  # its key was checked when it was begun, and has its own bounds
            access_log.entry_of(scope).key_name = keys.key_of(scope).name or None
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        gate.check_host(headers, self.server)
        if not cors.is_listed(scope):
            gate.check_origin(headers, scope["path"])
        is_open = _is_open(scope["path"], headers)
        key = NO_KEY if is_open else gate.check_key(headers, self.ring)
        keys.attach(scope, key)
        access_log.entry_of(scope).key_name = key.name or None
        if gate.follows(scope["path"], headers):
            await self.app(scope, receive, send)
            return
        with self.slots.hold(key):
            await self.app(scope, receive, send)


def _is_open(path: str, headers: Headers) -> bool:
    """Whether a request needs no key."""
    return path in gate.READY or path.startswith("/health/") or is_page(path, headers)
