"""Server-sent events. Knows the wire format; knows nothing of what is sent."""

from __future__ import annotations

from starlette.types import Send

DONE = b"data: [DONE]\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


def event(data: bytes) -> bytes:
    """One event. `data` is JSON on one line."""
    return b"data: " + data + b"\n\n"


class EventStream:
    """A response whose status line leaves with its first events, not before."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, *events: bytes) -> None:
        """Sends `events` in one piece; waits while the client reads slower than we write."""
        await self._body(events, more_body=True)

    async def end(self, *events: bytes) -> None:
        """Sends the last `events` and closes the response."""
        await self._body(events, more_body=False)

    async def _body(self, events: tuple[bytes, ...], *, more_body: bool) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        body = b"".join(events)
        await self._send({"type": "http.response.body", "body": body, "more_body": more_body})
