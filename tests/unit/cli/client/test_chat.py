"""The chat client yields a response's bytes as they arrive."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.unit.cli.scripted_server import ScriptedServer, listening
from vlm_server.cli.client.chat import ChatClient

BODY = b'{"messages": []}'


def client(url: str) -> ChatClient:
    return ChatClient(url, api_key=None, timeout=None, trust_env=False)


async def test_chat_client_yields_bytes_as_they_arrive():
    server = ScriptedServer(lambda _: [(0.0, b"first"), (1.0, b"last")])
    async with (
        listening(server) as url,
        client(url) as chat,
        chat.post(BODY, len(BODY)) as response,
    ):
        start = time.perf_counter()
        received = response.received()
        first, data = await anext(received)
        is_early = time.perf_counter() - start < 0.8
        last, _ = await anext(received)
    assert (response.status, data, is_early) == (200, b"first", True)
    assert last - first == pytest.approx(1.0, abs=0.3)


async def test_chat_client_raises_on_refused_connection():
    async with client("http://127.0.0.1:9/v1") as chat:
        with pytest.raises(httpx.ConnectError):
            async with chat.post(BODY, len(BODY)):
                pass
