"""Server-sent events: framing, the stream of an answer, and its keep-alives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal, get_args

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Send

from vlm_server.errors import InvalidRequest
from vlm_server.settings import Server

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: every reader of events skips it."""

CONTENT_TYPE = b"text/event-stream; charset=utf-8"

Keepalive = Literal["comment", "empty_chunk", "off"]
KEEPALIVE_HEADER = "X-VLM-Keepalive"


def keepalive_of(headers: Headers, server: Server) -> Keepalive:
    """The keep-alive of silent streams: the header's, else the setting's. Raises InvalidRequest."""
    try:
        mode: Keepalive = msgspec.convert(
            headers.get(KEEPALIVE_HEADER, server.stream_keepalive), Keepalive
        )
    except msgspec.ValidationError:
        choices = ", ".join(get_args(Keepalive))
        raise InvalidRequest(f"{KEEPALIVE_HEADER} must be one of: {choices}.") from None
    return mode


def event(data: bytes, name: str = "") -> bytes:
    """One event on the wire, with its name if it has one. `data` is JSON on one line."""
    name_line = b"event: " + name.encode() + b"\n" if name else b""
    return name_line + b"data: " + data + b"\n\n"


def response_start(content_type: bytes) -> Message:
    """ASGI's start of a streaming response."""
    headers = [(b"content-type", content_type), (b"cache-control", b"no-cache")]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def comment(text: str) -> bytes:
    """A comment on the wire: every reader of events skips it."""
    return b": " + text.encode() + b"\n\n"


class EventStream:
    """A streaming response, whose status line goes out with the first events or keep-alive.

    While `kept_alive`, `keep_alive()` is sent after each `keepalive_seconds` of silence.
    """

    def __init__(
        self,
        send: Send,
        content_type: bytes,
        keep_alive: Callable[[], bytes] | None,
        keepalive_seconds: float,
    ) -> None:
        self._send = send
        self._content_type = content_type
        self._make_keep_alive = keep_alive
        self._keepalive_seconds = keepalive_seconds
        self._sending = asyncio.Lock()
        self._sent_at = 0.0
        self._has_ended = False
        self.started = False

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Send keep-alives while the `with` block is silent."""
        if self._make_keep_alive is None:
            yield
            return
        self._sent_at = asyncio.get_running_loop().time()
        task = asyncio.create_task(self._keep_alive(self._make_keep_alive))
        try:
            yield
        finally:
            task.cancel()

    async def write(self, *events: bytes) -> None:
        """Send `events` in one piece; empty ones do not end the silence."""
        if any(events):
            await self._body(events, more_body=True)

    async def end(self, *events: bytes) -> None:
        """Send the last `events` and end the response."""
        await self._body(events, more_body=False)

    async def _keep_alive(self, keep_alive: Callable[[], bytes]) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            silence = clock() - self._sent_at
            if silence >= self._keepalive_seconds:
                await self.write(keep_alive())
                silence = 0.0
            await asyncio.sleep(self._keepalive_seconds - silence)

    async def _body(self, events: tuple[bytes, ...], *, more_body: bool) -> None:
        async with self._sending:
            if self._has_ended:  # this was a keep-alive that waited for the lock
                return
            self._has_ended = not more_body
            self._sent_at = asyncio.get_running_loop().time()
            if not self.started:
                self.started = True
                await self._send(response_start(self._content_type))
            body = b"".join(events)
            await self._send({"type": "http.response.body", "body": body, "more_body": more_body})
