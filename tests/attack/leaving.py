"""Clients that begin long answers and leave: what they send, and the wait until nothing is left."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from tests.support.daemons import ADMIN_KEY, Daemon, wait_until


def client_of(daemon: Daemon, key: str = ADMIN_KEY) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=daemon.url,
        headers={"Authorization": f"Bearer {key}"},
        limits=httpx.Limits(max_connections=200),
        timeout=60,
        trust_env=False,
    )


async def leave(daemon: Daemon, path: str, body: dict[str, Any], *headers: str) -> int:
    """Post `body`, and break off the connection once the answer begins; returns its status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
    content = json.dumps(body).encode()
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Authorization: Bearer {ADMIN_KEY}",
        f"Content-Length: {len(content)}",
        *headers,
    )
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
    status = int((await reader.read(400)).split(maxsplit=2)[1])
    writer.transport.abort()
    return status


def until_empty(daemon: Daemon, *names: str) -> None:
    """Wait until no request is in flight, and the metrics of these names are 0."""

    def is_empty() -> bool:
        metrics = daemon.metrics()
        return not any(metrics[name] for name in ("requests_in_flight", *names))

    wait_until(is_empty, 30, daemon.log)
