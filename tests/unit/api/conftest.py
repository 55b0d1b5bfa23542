"""The real application, in memory and on a real socket, with a scripted engine."""

from __future__ import annotations

import asyncio
import atexit
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path

import httpx
import pytest

from tests.unit.api.scripted_engine import OneModel, ScriptedEngine
from vlm_server.api.app import create_app
from vlm_server.api.http.connection.server import HttpServer
from vlm_server.api.parsing.body_parser import start_pool
from vlm_server.platform.child.pool import ChildPool
from vlm_server.settings import Limits, Settings

Connect = Callable[..., httpx.AsyncClient]


@cache
def parsing_pool() -> ChildPool:
    """One pool for all tests, since starting a process takes a moment."""
    pool = start_pool(Limits())
    atexit.register(pool.close)
    return pool


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def connect(engine: ScriptedEngine) -> AsyncIterator[Connect]:
    """Make a client of an application with the given settings; no socket in between."""
    async with AsyncExitStack() as stack:

        def make(
            settings: Settings | None = None, settings_file: Path | None = None
        ) -> httpx.AsyncClient:
            settings = settings or Settings()
            models = OneModel(engine, settings.model.aliases)
            app = create_app(settings, models, parsing_pool(), settings_file=settings_file)
            client = httpx.AsyncClient(
                transport=httpx.ASGITransport(app, raise_app_exceptions=False),
                base_url="http://127.0.0.1:8000",
            )
            stack.push_async_callback(client.aclose)
            return client

        yield make


@pytest.fixture
def client(connect: Connect) -> httpx.AsyncClient:
    return connect()


@asynccontextmanager
async def listening(engine: ScriptedEngine, settings: Settings | None = None) -> AsyncIterator[int]:
    """The application behind the real HTTP server; yields the port."""
    settings = settings or Settings()
    app = create_app(settings, OneModel(engine), parsing_pool())
    server = HttpServer(app, settings)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started:  # noqa: ASYNC110  uvicorn offers nothing to wait for
                await asyncio.sleep(0.005)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            await task
