"""uvicorn around our connections: its configuration, its end, and the limit on open files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from vlm_server.api.http.connection.protocol import HttpConnection, Shared
from vlm_server.api.http.connection.table import ConnectionTable
from vlm_server.api.http.connection.turns import Turns
from vlm_server.api.http.errors import EncodeError
from vlm_server.settings import Settings

logger = logging.getLogger(__name__)

SLOW_READER_SECONDS = 5
"""Time for clients to read the last bytes of their answers after the drain."""

RESERVED_FILES = 128
"""Open files that no connection gets: for the engine's sockets, new processes, the disk."""

_MOST_FILES = 1 << 16
"""Enough. Some systems call no limit what they refuse to grant."""


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers: the engine must be stopped too."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end_within(self, seconds: float) -> None:
        """Disconnect in `seconds` the clients that are still there; nothing is left to answer."""
        asyncio.get_running_loop().call_later(seconds, self._disconnect_all)

    def _disconnect_all(self) -> None:
        for connection in list(self.server_state.connections):
            cast(HttpConnection, connection).fail()


def http_config(app: ASGIApp, settings: Settings, encode: EncodeError) -> uvicorn.Config:
    """The HTTP server's configuration; `encode` is for errors before the app is reached."""
    limit = connection_limit(settings.server.max_connections)
    shared = Shared(settings, encode, ConnectionTable(limit), Turns())
    return uvicorn.Config(
        cast(Any, app),
        http=cast("type[asyncio.Protocol]", partial(HttpConnection, shared)),
        ws="none",
        lifespan="off",
        backlog=2048,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(settings.server.drain_seconds) + SLOW_READER_SECONDS,
    )


def connection_limit(wanted: int) -> int:
    """`wanted` connections, or what the limit on open files leaves. Raises that limit first."""
    files = _raise_file_limit()
    limit = max(1, min(wanted, files - RESERVED_FILES))
    if limit < wanted:
        logger.warning("at most %d connections: only %d files may be open", limit, files)
    return limit


def _raise_file_limit() -> int:
    """How many files this process may open from now on: the hard limit, if that is to be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = _MOST_FILES if soft == resource.RLIM_INFINITY else soft
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    for files in (wanted, 10240):  # macOS grants no more than OPEN_MAX
        if files > soft and (files <= hard or hard == resource.RLIM_INFINITY):
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
                return files
    return soft
