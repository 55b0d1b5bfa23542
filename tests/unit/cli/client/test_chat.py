"""The chat client yields a response's bytes as they arrive."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from tests.unit.api.http.urls.tls_server import tls_server
from tests.unit.cli.scripted_server import ScriptedServer, listening
from vlm_server.cli.client.chat import ChatClient, stream_chunks
from vlm_server.cli.client.daemon import Daemon
from vlm_server.cli.exit_codes import CommandFailed

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


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("https://127.0.0.1:{tls}", "its certificate can't be verified: self-signed certificate"),
        ("http://no-such-host.invalid", "there is no host of this name"),
        ("http://127.0.0.1:9", "no daemon answers at"),
    ],
)
async def test_commands_say_why_daemon_does_not_answer(
    tmp_path: Path, host: str, reason: str
) -> None:
    async with tls_server(tmp_path, "127.0.0.1") as tls:
        url = f"{host.format(tls=tls.port)}/v1"
        with Daemon(url, has_proxy=False) as daemon:
            with pytest.raises(CommandFailed, match=reason):
                await asyncio.to_thread(daemon.list_models)
            with pytest.raises(CommandFailed, match=reason):
                await anext(stream_chunks(daemon, BODY))


async def test_chat_client_raises_on_refused_connection():
    async with client("http://127.0.0.1:9/v1") as chat:
        with pytest.raises(httpx.ConnectError):
            async with chat.post(BODY, len(BODY)):
                pass
