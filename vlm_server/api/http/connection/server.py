"""The uvicorn server of our connections: configuration, shutdown, and the limit on open files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import resource
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from vlm_server.api.http.connection.protocol import HttpConnection, Shared
from vlm_server.api.http.connection.table import ConnectionStage, ConnectionTable, ParseQueue
from vlm_server.settings import Settings

logger = logging.getLogger(__name__)

SLOW_READER_SECONDS = 5
"""Time for clients to read the last bytes of their answers after the drain."""

RESERVED_FILES = 128
"""Open files reserved for the engine's sockets, new processes and the disk."""

_MAX_FILES = 1 << 16
"""The limit on systems that report no limit but do not grant that."""

LAST_CALL_SECONDS = 1.0
"""Time for connected clients to send one more request before a restart."""
PARSING_SECONDS = 5.0
"""Time for those requests to be parsed and handed to the engine."""
_LOOK_SECONDS = 0.05
_COMPLETE = (ConnectionStage.ANSWER, ConnectionStage.CLOSING)
"""Stages of connections whose last request has arrived."""


class _DatedState(ServerState):
    """uvicorn's state, with a `Date` made on demand, without a timer."""

    def __init__(self) -> None:
        self._date = (0, list[tuple[bytes, bytes]]())
        super().__init__()

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        now = int(time.time())
        if self._date[0] != now:
            self._date = (now, [(b"date", formatdate(now, usegmt=True).encode())])
        return self._date[1]

    @default_headers.setter
    def default_headers(self, _: list[tuple[bytes, bytes]]) -> None:
        """Ignores uvicorn's own headers."""


class HttpServer(uvicorn.Server):
    """uvicorn's server without polling, and without signal handlers: the engine stops, too."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._exit = asyncio.Event()
        self._table = ConnectionTable(ConnectionLimit(settings.server.max_connections))
        shared = Shared(settings, self._table, ParseQueue())
        drain_timeout_seconds = math.ceil(settings.server.drain_timeout_seconds)
        config = uvicorn.Config(
            cast(Any, app),
            http=cast("type[asyncio.Protocol]", partial(HttpConnection, shared)),
            ws="none",
            lifespan="off",
            backlog=2048,
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=drain_timeout_seconds + SLOW_READER_SECONDS,
        )
        super().__init__(config)
        self.server_state = _DatedState()

    @property
    def should_exit(self) -> bool:
        """Whether to stop; set on the event loop's thread only."""
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        if value:
            self._exit.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Wait for the end, instead of uvicorn's polling."""
        await self._exit.wait()

    async def last_call(self, num_in_engine: Callable[[], int]) -> None:
        """Accept no more connections, and one more request on each open one.

        Returns once the engine has the requests that arrive within seconds. New connections wait in
        the kernel, if another process keeps the sockets open. The servers are not closed here:
        asyncio drops connections accepted just before a server is closed.
        """
        if not self.started:
            return
        loop = asyncio.get_running_loop()
        for listening in self.servers:
            for listening_socket in listening.sockets:
                loop.remove_reader(listening_socket)
        clock, began = loop.time, loop.time()
        while clock() < began + LAST_CALL_SECONDS:
            await asyncio.sleep(_LOOK_SECONDS)
            for connection in self._connections:
                connection.close_after_next()
            if all(connection.stage in _COMPLETE for connection in self._connections):
                break
        await self.hand_over(num_in_engine, began + PARSING_SECONDS - clock())

    async def hand_over(self, num_in_engine: Callable[[], int], seconds: float) -> None:
        """Wait, at most `seconds`, until the engine has the complete requests: those are answered.

        num_in_engine: the number of requests of open connections that the engine has.
        """
        clock = asyncio.get_running_loop().time
        ends_at = clock() + seconds
        while clock() < ends_at:
            stages = [connection.stage for connection in self._connections]
            if stages.count(ConnectionStage.ANSWER) <= num_in_engine():
                return
            await asyncio.sleep(_LOOK_SECONDS)

    @property
    def _connections(self) -> list[HttpConnection]:
        return [cast(HttpConnection, connection) for connection in self.server_state.connections]

    def drain(self) -> None:
        """Finish complete requests, and answer later ones with 503."""
        self._table.takes_requests = False
        for connection in self._connections:
            connection.drain()

    def apply_file_limit(self) -> None:
        """Close connections if the limit on open files was lowered; called periodically."""
        self._table.make_room()

    def end_within(self, seconds: float) -> None:
        """Disconnect the remaining clients after `seconds`; all requests have been answered."""

        def disconnect_all() -> None:
            for connection in self._connections:
                connection.fail()

        asyncio.get_running_loop().call_later(seconds, disconnect_all)


class ConnectionLimit:
    """The limit on connections: `wanted`, or less by that on open files, raised if possible."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._told = max_connections
        _raise_file_limit()
        self()

    def __call__(self) -> int:
        files = _file_limit()
        limit = max(1, min(self._max_connections, files - RESERVED_FILES))
        if limit < self._told:
            logger.warning("at most %d connections: only %d files may be open", limit, files)
        self._told = limit
        return limit


def _file_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_FILES if soft == resource.RLIM_INFINITY else soft


def _raise_file_limit() -> None:
    """Raise the limit to the hard limit, or as far as the system allows."""
    soft, hard = _file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    num_files = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    for files in (num_files, 10240):  # macOS grants no more than OPEN_MAX
        if files > soft and (files <= hard or hard == resource.RLIM_INFINITY):
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
                return
