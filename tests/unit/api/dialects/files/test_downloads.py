"""Downloads of files over the real connection layer: slow clients, and clients that leave."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.support.waiting import until
from tests.unit.api.conftest import listening
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.settings import FileSettings, Limits, Settings

MIB = 1 << 20
DATA = os.urandom(16 * MIB)
NAME = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


@pytest.fixture
async def port(engine: ScriptedEngine, tmp_path: Path) -> AsyncIterator[int]:
    files = FileSettings(folder=str(tmp_path / "files"))
    settings = Settings(limits=Limits(max_unread_bytes=MIB), files=files)
    async with listening(engine, settings) as port:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            assert (await client.put("/v1/media", content=DATA)).json()["id"] == NAME
        yield port


async def begin(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    writer.write(f"GET /v1/media/{NAME} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    return reader, writer


async def test_slow_client_gets_whole_file(port: int) -> None:
    reader, writer = await begin(port)
    await asyncio.sleep(0.5)  # the server would have sent more than a client may leave unread
    assert await reader.readexactly(len(DATA)) == DATA
    writer.close()


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at descriptors in /proc")
async def test_client_that_leaves_keeps_no_file_open(port: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        _, writer = await begin(port)
        writer.transport.abort()
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before, 5)
