"""An HTTP connection: its requests, one after another, and bounds on its client's cost."""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import socket
import time
import uuid
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from vlm_server.api.http import errors
from vlm_server.api.http.connection.exchange import RECEIVED_AT, Exchange, RawHeaders, scope_of
from vlm_server.api.http.connection.outgoing import Deadline, Outgoing
from vlm_server.api.http.connection.parser import HeadReader, RequestParser
from vlm_server.api.http.connection.table import ConnectionStage, ConnectionTable, ParseQueue
from vlm_server.errors import EngineUnavailable, QueueFull, RequestError, RequestTimeout
from vlm_server.settings import Settings

logger = logging.getLogger(__name__)

MAX_PIPELINED_BYTES = 64 * 1024
"""The most bytes that a client may send during an answer before it is disconnected. They are read
to notice the end of the connection."""
LINGER_SECONDS = 2.0
"""Time after a refusal for which further bytes are read and discarded: closing immediately would
reset the connection, perhaps before the client has read the response."""
MAX_LINGER_BYTES = 64 << 20
"""The most bytes read and discarded."""

_STOPPING = "The server is stopping."
_TOO_MANY = "The server has too many connections (server.max_connections); try again in a moment."
_HIGH_WATER_BYTES = 256 * 1024
"""The most bytes of a body read ahead of the application."""


_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPALIVE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Seconds of silence (named differently on Linux and macOS), seconds between probes, and probes."""


@dataclass(frozen=True, slots=True)
class Shared:
    """State shared by all connections of a server."""

    settings: Settings
    table: ConnectionTable
    parse_queue: ParseQueue


class HttpConnection(asyncio.Protocol):
    """One connection, created by uvicorn; `shared` is the first argument (`partial`)."""

    def __init__(
        self,
        shared: Shared,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._shared = shared
        self._limits = shared.settings.limits
        self._server = shared.settings.server
        self._app = config.loaded_app
        self._state = server_state
        self._app_state = app_state
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # until it is made
        self._head = HeadReader()
        self._exchange: Exchange | None = None
        self._deadline = Deadline(self._loop, self._on_deadline)
        self._outgoing: Outgoing = None  # type: ignore[assignment]  # likewise
        self._ignored_bytes = 0
        self._is_stopping = False
        self._is_queued = False
        self.stage = ConnectionStage.SILENT
        self.since = self._loop.time()
        """The beginning of the stage, by the loop's clock."""

    # ---- asyncio -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        _notice_silence(transport.get_extra_info("socket"))
        self._outgoing = Outgoing(transport, self._limits, self._drop)
        self._state.connections.add(self)  # type: ignore[arg-type]  # it takes uvicorn's own
        if self._shared.table.add(self):
            self._enter(ConnectionStage.SILENT, self._server.header_timeout_seconds)
        else:
            self._refuse(QueueFull(_TOO_MANY))
            self._close()  # without lingering: it is over the limit

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(self)
        self._shared.table.discard(self)
        self._deadline.cancel()
        self._outgoing.close()
        self._enter(ConnectionStage.CLOSING)
        if self._exchange is not None:
            self._exchange.disconnect()

    def data_received(self, data: bytes) -> None:
        if self.stage is ConnectionStage.CLOSING:
            self._ignored_bytes += len(data)
            if self._ignored_bytes > MAX_LINGER_BYTES:
                self._transport.abort()
        elif self.stage is ConnectionStage.BODY:
            assert self._exchange is not None
            self._exchange.parser.feed(data)
            if not self._is_queued:
                self.parse_slice()
        else:
            self._head.buffer += data
            if self.stage is not ConnectionStage.ANSWER:
                self._begin()
            elif len(self._head.buffer) > MAX_PIPELINED_BYTES:
                self._drop("sent too much behind a request")

    def eof_received(self) -> None:
        """A half-closed connection counts as closed: a complete answer is sent, and no other."""
        if self._exchange is not None:
            self._exchange.disconnect()
        self._close()

    def pause_writing(self) -> None:
        self._outgoing.paused()

    def resume_writing(self) -> None:
        self._outgoing.resumed()

    # ---- uvicorn and the table -----------------------------------------------------

    def shutdown(self) -> None:
        """Stop the server: complete requests are answered, other connections closed."""
        self.drain()
        if self.stage not in (ConnectionStage.ANSWER, ConnectionStage.CLOSING):
            self._close()

    def drain(self) -> None:
        """Prepare for the stop: complete requests are answered, later ones refused."""
        self._is_stopping = True
        if self.stage is ConnectionStage.BODY:
            self._refuse(EngineUnavailable(_STOPPING))
        elif self.stage is ConnectionStage.ANSWER:
            assert self._exchange is not None
            self._exchange.keep_alive = False

    def close_after_next(self) -> None:
        """Prepare for the stop: close the connection after this response or the next."""
        self._is_stopping = True
        if self._exchange is not None and not self._exchange.has_begun:
            self._exchange.keep_alive = False

    def evict(self) -> None:
        """Close immediately, to make room for another connection (`ConnectionTable`)."""
        self._drop("gave way to another connection")

    # ---- requests ------------------------------------------------------------------

    def _begin(self) -> None:
        """Start a request if its head is complete."""
        try:
            head = self._head.take_head()
            if head is None:
                if self._head.buffer and self.stage is not ConnectionStage.HEAD:
                    self._enter(ConnectionStage.HEAD, self._server.header_timeout_seconds)
                return
            parser = RequestParser(head)
            if not self._shared.table.takes_requests:
                raise EngineUnavailable(_STOPPING)
        except RequestError as error:
            self._refuse(error)
            return
        peers = {
            "server": get_local_addr(self._transport),
            "client": get_remote_addr(self._transport),
            "state": self._app_state.copy(),
            RECEIVED_AT: time.monotonic(),
        }
        scope = scope_of(parser.request, peers)
        exchange = self._exchange = Exchange(parser, scope, self, self._state.default_headers)
        exchange.keep_alive = not self._is_stopping
        task = self._loop.create_task(exchange.run(self._app))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)
        self._enter(ConnectionStage.BODY)
        parser.feed(self._head.take_body(parser.remaining_bytes))
        self.parse_slice()

    def parse_slice(self) -> None:
        """Parse one slice of the body; the rest in later turns of the loop."""
        self._is_queued = False
        exchange = self._exchange
        if exchange is None or self.stage is not ConnectionStage.BODY:
            return
        parser = exchange.parser
        try:
            exchange.add_body(parser.parse())
        except RequestError as error:
            self._refuse(error)
            return
        if parser.is_complete:
            self._head.buffer += parser.rest
            self._end_of_request()
        elif parser.has_more:
            self._is_queued = True
            self._transport.pause_reading()
            self._shared.parse_queue.add(self)
        elif exchange.unread_body_bytes > _HIGH_WATER_BYTES:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _end_of_request(self) -> None:
        assert self._exchange is not None
        self._transport.resume_reading()
        if self._exchange.is_complete:  # this was the rest of an unread body
            self._next()
        else:
            self._enter(ConnectionStage.ANSWER)

    def _next(self) -> None:
        """Begin the next request after an exchange, or wait for it."""
        self._exchange = None
        self._enter(ConnectionStage.IDLE, self._server.idle_timeout_seconds)
        if self._head.buffer:
            self._begin()

    # ---- calls of an exchange -------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send `data` without waiting; a client that leaves too much unread is disconnected."""
        if self.stage is not ConnectionStage.CLOSING:
            self._outgoing.write(data)

    async def wait_until_read(self) -> None:
        """Wait until the client has read most of what was sent, or has left."""
        await self._outgoing.wait_until_read()

    def resume_body(self) -> None:
        """Read more of the body, for which the application waits."""
        if not self._is_queued:
            self._transport.resume_reading()

    def end_response(self) -> None:
        """Continue after a complete response."""
        exchange = self._exchange
        assert exchange is not None
        self._state.total_requests += 1
        if self.stage is ConnectionStage.CLOSING:
            return
        if exchange.must_close:
            self._close_after(is_all_here=exchange.parser.is_complete)
        elif exchange.parser.is_complete:
            self._next()
        else:
            self._deadline.set(LINGER_SECONDS)  # a short rest of an unread body
            self.resume_body()

    def fail(self) -> None:
        """Disconnect immediately."""
        self._transport.abort()

    # ---- ends ----------------------------------------------------------------------

    def _refuse(self, error: RequestError) -> None:
        """Respond with `error` in place of the application, then close."""
        logger.info("rejected a request: %s (%d)", error.code.replace("_", " "), error.status)
        exchange = self._exchange
        if exchange is not None:
            exchange.disconnect()
        if exchange is None or not exchange.has_begun:
            self.write(_refusal(error, self._state.default_headers))
        self._close_after(is_all_here=False)

    def _close_after(self, *, is_all_here: bool) -> None:
        """Close once everything is sent; linger if the client may still be sending."""
        if is_all_here:
            self._close()
        else:
            self._enter(ConnectionStage.CLOSING, LINGER_SECONDS)
            try:
                self._transport.write_eof()
            except OSError:  # reset by the client during a pause
                self._transport.abort()
            self._transport.resume_reading()

    def _close(self) -> None:
        """Close once everything is sent, or when the client reads too slowly."""
        self._enter(ConnectionStage.CLOSING, self._limits.unread_timeout_seconds)
        self._transport.close()

    def _drop(self, reason: str) -> None:
        logger.info("disconnected a client that %s", reason)
        self._enter(ConnectionStage.CLOSING)
        self._transport.abort()
        if self._exchange is not None:
            self._exchange.disconnect()

    def _enter(self, stage: ConnectionStage, seconds: float | None = None) -> None:
        """Change the stage, which must end within `seconds`."""
        self.stage = stage
        self.since = self._loop.time()
        if seconds is None:
            self._deadline.clear()
        else:
            self._deadline.set(seconds)

    def _on_deadline(self) -> None:
        if self.stage is ConnectionStage.HEAD:
            seconds = self._server.header_timeout_seconds
            text = f"The request's headers did not arrive within {seconds:g} seconds."
            self._refuse(RequestTimeout(text))
        elif self.stage in (ConnectionStage.SILENT, ConnectionStage.IDLE):
            self._close()
        else:
            self._transport.abort()


def _refusal(error: RequestError, headers: RawHeaders) -> bytes:
    """`error` as a whole response on the wire; `headers` are those of every response."""
    request_id = uuid.uuid4().hex
    own_headers = {"X-Request-Id": request_id, "Request-Id": request_id, "Connection": "close"}
    response = errors.response(
        error, errors.encode_openai, retry_after_seconds=1, headers=own_headers
    )
    status = http.HTTPStatus(error.status)
    lines = [b"HTTP/1.1 %d %s" % (status, status.phrase.encode())]
    lines += [b"%s: %s" % header for header in (*headers, *response.raw_headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + bytes(response.body)


def _notice_silence(connection: socket.socket | None) -> None:
    """Make the kernel detect within two minutes that a client's machine is gone."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):  # the client is gone already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
