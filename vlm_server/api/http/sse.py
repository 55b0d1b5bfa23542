"""Sends server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: every reader of events skips it."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


def event(data: bytes) -> bytes:
    """One event on the wire. `data` is JSON on one line."""
    return b"data: " + data + b"\n\n"


class EventStream:
    """A streaming response. Its status line is sent with the first events, or the first comment.

    While it is `kept_alive`, a comment is sent after each `keepalive_seconds` without events.
    """

    def __init__(self, send: Send, keepalive_seconds: float) -> None:
        self._send = send
        self._keepalive_seconds = keepalive_seconds
        self._sending = asyncio.Lock()
        self._sent_at = 0.0
        self._has_ended = False
        self.started = False

    @asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Send comments while the `with` block is silent."""
        self._sent_at = asyncio.get_running_loop().time()
        task = asyncio.create_task(self._keep_alive())
        try:
            yield
        finally:
            task.cancel()

    async def write(self, *events: bytes) -> None:
        """Send `events` together."""
        await self._body(events, more_body=True)

    async def end(self, *events: bytes) -> None:
        """Send the last `events` and end the response."""
        await self._body(events, more_body=False)

    async def _keep_alive(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            silence = clock() - self._sent_at
            if silence >= self._keepalive_seconds:
                await self.write(KEEP_ALIVE)
                silence = 0.0
            await asyncio.sleep(self._keepalive_seconds - silence)

    async def _body(self, events: tuple[bytes, ...], *, more_body: bool) -> None:
        async with self._sending:
            if self._has_ended:  # a comment that waited meanwhile
                return
            self._has_ended = not more_body
            self._sent_at = asyncio.get_running_loop().time()
            if not self.started:
                self.started = True
                start = {"type": "http.response.start", "status": 200, "headers": _HEADERS}
                await self._send(start)
            body = b"".join(events)
            await self._send({"type": "http.response.body", "body": body, "more_body": more_body})
