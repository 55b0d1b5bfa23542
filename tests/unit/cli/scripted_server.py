"""A chat server that streams scripted bytes at scripted times, and records its requests."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

Script = Callable[[dict[str, Any]], list[tuple[float, bytes]]]
"""From a request's JSON to what is sent: (seconds to wait before, bytes)."""


def event(**content: Any) -> bytes:
    """A server-sent event with this JSON."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text(content: str) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": content}}])


def ending(completion_tokens: int, prompt_tokens: int = 3, cached_tokens: int = 1) -> bytes:
    usage = {
        "prompt_tokens": prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens": completion_tokens,
    }
    return event(choices=[], usage=usage) + b"data: [DONE]\n\n"


def echo(request: dict[str, Any]) -> list[tuple[float, bytes]]:
    """An answer that depends on nothing but the messages; one delta a token."""
    digest = f"{hash(json.dumps(request['messages'])):x}"
    tokens = request["max_tokens"]
    return [*[(0.0, text(digest)) for _ in range(tokens)], (0.0, ending(tokens))]


@dataclass
class ScriptedServer:
    """The ASGI application. `status` other than 200 is answered with the script's bytes."""

    script: Script = echo
    status: int = 200
    requests: list[dict[str, Any]] = field(default_factory=list)
    decisions: dict[str, int] = field(default_factory=dict)
    """Decisions of the memory governor, as the server's status reports them."""
    keys: list[str | None] = field(default_factory=list)
    """The routing key of each request."""
    authorizations: list[str | None] = field(default_factory=list)
    """The header `Authorization` of each request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health/live":
            await self._answer(send, [(0.0, b'{"status": "live"}')], 200)
            return
        if scope["path"] == "/v1/models":
            await self._answer(send, [(0.0, b'{"data": [{"id": "scripted"}]}')], 200)
            return
        if scope["path"] == "/v1/status":
            status_document = {"engine": {"stats": {"memory": {"decisions": self.decisions}}}}
            await self._answer(send, [(0.0, json.dumps(status_document).encode())], self.status)
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.requests.append(json.loads(body))
        self.keys.append(Headers(scope=scope).get("x-smg-routing-key"))
        self.authorizations.append(Headers(scope=scope).get("authorization"))
        await self._answer(send, self.script(self.requests[-1]), self.status)

    async def _answer(self, send: Send, pieces: list[tuple[float, bytes]], status: int) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        for seconds, piece in pieces:
            if seconds:
                await asyncio.sleep(seconds)
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def listening(app: ScriptedServer) -> AsyncIterator[str]:
    """`app` behind uvicorn on a free port; gives its base URL."""
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="error"))
    with _listener() as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started:  # noqa: ASYNC110  uvicorn offers nothing to wait for
                await asyncio.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            await task


def _listener() -> socket.socket:
    """A socket that says it is TCP: asyncio sends small pieces at once only if it does."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener
