"""Sends server-sent events."""

from __future__ import annotations

from starlette.types import Send

DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


def event(data: bytes) -> bytes:
    """One event on the wire. `data` is JSON on one line."""
    return b"data: " + data + b"\n\n"


class EventStream:
    """A streaming response. Its status line is sent with the first events, not before."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, *events: bytes) -> None:
        """Send `events` together; waits while the client reads more slowly than we write."""
        await self._body(events, more_body=True)

    async def end(self, *events: bytes) -> None:
        """Send the last `events` and end the response."""
        await self._body(events, more_body=False)

    async def _body(self, events: tuple[bytes, ...], *, more_body: bool) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        body = b"".join(events)
        await self._send({"type": "http.response.body", "body": body, "more_body": more_body})
