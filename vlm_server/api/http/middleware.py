"""The layers around every route: the log line and its count, errors as JSON, and the gate.

Knows ASGI, headers and the error tree; knows nothing of what a route does. Each layer is
plain ASGI, so that streams and disconnects pass through untouched.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlm_server.api.http import cache_salt, gate, record
from vlm_server.api.http.disconnect import ClientGone
from vlm_server.api.openai import errors as openai_errors
from vlm_server.api.operations.metrics import AnsweredRequests
from vlm_server.errors import InternalError, RequestError
from vlm_server.settings import Cache, Server
from vlm_server.supervisor.client import EngineClient


class RequestLog:
    """Names each request, in the log and in `X-Request-Id`, and counts it when it ends."""

    def __init__(self, app: ASGIApp, answered: AnsweredRequests) -> None:
        self.app = app
        self.answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        line = record.attach(scope)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = line.request_id
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        finally:
            route = _route(scope)
            line.log(scope["method"], route)
            self.answered[route, line.status] += 1


class Errors:
    """FairQueue what a request raises into OpenAI's shape; a client never sees a traceback."""

    def __init__(self, app: ASGIApp, engine: EngineClient) -> None:
        self.app = app
        self.engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        line = record.of(scope)
        try:
            await self.app(scope, receive, send)
        except ClientGone:
            line.status = record.CLIENT_GONE
        except RequestError as error:
            await self._answer(error, scope, receive, send)
        except Exception:
            record.logger.exception("id=%s failed unexpectedly", line.request_id)
            if line.status:  # the response has begun: only closing the connection is left
                raise
            await self._answer(InternalError("The server failed."), scope, receive, send)

    async def _answer(
        self, error: RequestError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        record.of(scope).error_code = error.code
        response = openai_errors.response(error, self.engine.status.retry_after_seconds)
        await response(scope, receive, send)


class Gate:
    """Lets in who may ask: a Host of ours, no foreign Origin, a valid key.

    Requests with different keys get different cache salts, if the settings say so.
    """

    def __init__(self, app: ASGIApp, server: Server, cache: Cache) -> None:
        self.app = app
        self.server = server
        self.cache = cache

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            gate.check_host(headers, self.server)
            gate.check_origin(headers)
            if not scope["path"].startswith("/health/"):
                key = gate.check_key(headers, self.server)
                cache_salt.attach(scope, key if self.cache.separate_api_keys else None)
        await self.app(scope, receive, send)


def _route(scope: Scope) -> str:
    """The route as it is declared, so that no path that a client made up gets anywhere."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else "(no route)"
