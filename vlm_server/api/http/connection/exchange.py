"""One request and its response: ASGI's scope, `receive` and `send`."""

from __future__ import annotations

import asyncio
import http
import logging
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import h11
from starlette.types import ASGIApp, Message, Scope

from vlm_server.api.http.connection.parser import RequestParser

if TYPE_CHECKING:
    from vlm_server.api.http.connection.protocol import HttpConnection

logger = logging.getLogger(__name__)

RawHeaders = list[tuple[bytes, bytes]]

RECEIVED_AT = "vlm_server.received_at"
"""Key in a scope of the monotonic time at which the head was complete."""
_WAIT = "vlm_server.wait_until_read"
"""Key in a scope of the wait for the client (`wait_until_read`)."""
MAX_SWALLOWED_BYTES = 64 * 1024
"""The longest rest of an unread body that is read to its end. With a longer one, the connection is
closed after the response."""
_CLOSE = (b"connection", b"close")
_ABSOLUTE = re.compile(rb"https?://(?P<host>[^/?#]*)(?P<rest>.*)", re.IGNORECASE)


class Exchange:
    """The request in `parser`, answered by the application. `send` never waits for the client."""

    def __init__(
        self,
        parser: RequestParser,
        scope: Scope,
        connection: HttpConnection,
        default_headers: RawHeaders,
    ) -> None:
        self.parser = parser
        self.keep_alive = True
        self.is_gone = False
        self.is_complete = False
        """Whether the response is complete."""
        self.has_begun = False
        """Whether the application has begun to respond."""
        self._scope = scope
        scope[_WAIT] = connection.wait_until_read
        self._connection = connection
        self._default_headers = default_headers
        self._head: bytes | None = None
        """The response's head, held back until the first bytes of its body."""
        self._body = bytearray()
        self._has_news = asyncio.Event()

    @property
    def must_close(self) -> bool:
        """Whether the connection must be closed after the complete response."""
        return not self.keep_alive or self.parser.http.our_state is not h11.DONE

    @property
    def unread_body_bytes(self) -> int:
        """Bytes of the body that the application has not taken."""
        return len(self._body)

    def add_body(self, data: bytearray) -> None:
        """Add bytes of the body, or its end. `data` is not copied if no earlier bytes wait."""
        if self.is_complete:  # no reader is left
            data.clear()
        if self._body:
            self._body += data
        else:
            self._body = data
        self._has_news.set()

    def disconnect(self) -> None:
        """Report to the application that the client has left; drop the rest of the response."""
        self.is_gone = True
        self._has_news.set()

    async def run(self, app: ASGIApp) -> None:
        """Call the application; its exceptions are logged and end the request."""
        try:
            await app(self._scope, self.receive, self.send)
        except asyncio.CancelledError:
            self._connection.fail()
            raise
        except Exception:
            logger.exception("the application failed")
        if not (self.is_complete or self.is_gone):
            self._connection.fail()

    async def receive(self) -> Message:
        """ASGI's `receive`: the next bytes of the body; after its end, the client's disconnect."""
        if self.parser.http.they_are_waiting_for_100_continue and not self.is_gone:
            go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self._connection.write(self.parser.http.send(go_on) or b"")
        if not (self.is_gone or self.is_complete):
            self._connection.resume_body()
            await self._has_news.wait()
            self._has_news.clear()
        if self.is_gone or self.is_complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": not self.parser.is_complete}

    async def send(self, message: Message) -> None:
        """ASGI's `send`: a part of the response; the head goes out with the body's first bytes."""
        if self.is_gone:
            return
        if message["type"] == "http.response.start":
            self._head = self._start(message["status"], list(message.get("headers", ())))
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        data = self._send(h11.Data(data=b"" if self._scope["method"] == "HEAD" else body))
        if not more:
            data += self._send(h11.EndOfMessage())
            self.is_complete = True
        if self._head is not None:
            data, self._head = self._head + data, None
        self._connection.write(data)
        if self.is_complete:
            self._has_news.set()
            self._connection.end_response()

    def _start(self, status: int, headers: RawHeaders) -> bytes:
        self.has_begun = True
        headers = self._default_headers + headers
        if _CLOSE not in headers and not (self.keep_alive and self._may_follow()):
            headers.append(_CLOSE)
        reason = http.HTTPStatus(status).phrase.encode()
        return self._send(h11.Response(status_code=status, headers=headers, reason=reason))

    def _may_follow(self) -> bool:
        """Whether another request may follow: not if the body is not read to its end."""
        if self.parser.is_complete:
            return True
        remaining = self.parser.remaining_bytes
        is_coming = not self.parser.http.they_are_waiting_for_100_continue
        return is_coming and remaining is not None and remaining <= MAX_SWALLOWED_BYTES

    def _send(self, event: h11.Event) -> bytes:
        return self.parser.http.send(event) or b""


async def wait_until_read(scope: Scope) -> None:
    """Wait until the client has read most of what was sent, or has left: `send` never waits.

    Returns immediately if the request of `scope` came by another server's connection.
    """
    if _WAIT in scope:
        await scope[_WAIT]()


def scope_of(request: h11.Request, peers: dict[str, Any]) -> Scope:
    """`request` as an ASGI scope; `peers` are the scope's entries about the connection.

    A target may be an absolute URI. Then its host replaces the Host header, as RFC 9112
    (3.2.2) demands, so that checks of Host see it.
    """
    target, headers = request.target, list(request.headers)
    if match := _ABSOLUTE.fullmatch(target):
        target = match["rest"] if match["rest"].startswith(b"/") else b"/" + match["rest"]
        headers = [header for header in headers if header[0] != b"host"]
        headers.append((b"host", match["host"]))
    raw_path, _, query = target.partition(b"?")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": request.http_version.decode("ascii"),
        "scheme": "http",
        "method": request.method.decode("ascii"),
        "root_path": "",
        "path": unquote(raw_path.decode("ascii")),
        "raw_path": raw_path,
        "query_string": query,
        "headers": headers,
        **peers,
    }
