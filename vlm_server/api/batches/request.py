"""One line's request to the application: in this process, without a socket."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Scope

from vlm_server.api.http.access import keys
from vlm_server.api.http.access.keys import ApiKey
from vlm_server.api.http.queue import gaps


@dataclass
class Reply:
    """The response; `status` is 0 if there was none."""

    status: int = 0
    request_id: str = ""
    body: bytearray = field(default_factory=bytearray)


async def ask(
    app: ASGIApp, key: ApiKey, path: str, body: bytes, interrupted: asyncio.Event
) -> Reply:
    """The response of `app` to a POST with this key; `interrupted` ends it as a client's leaving
    would."""
    reply, unsent = Reply(), [bytearray(body)]

    async def receive() -> Message:
        if unsent:
            return {"type": "http.request", "body": unsent.pop(), "more_body": False}
        await interrupted.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            headers = {name.lower(): value for name, value in message["headers"]}
            reply.request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        else:
            reply.body += message.get("body", b"")

    await app(_scope(key, path, len(body)), receive, send)
    return reply


def _scope(key: ApiKey, path: str, num_bytes: int) -> Scope:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(num_bytes).encode()),
    ]
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
    }
    gaps.mark_line(scope)
    keys.attach(scope, key)
    return scope
