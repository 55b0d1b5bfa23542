"""What `vlm-server serve` does: the front process, which serves HTTP and keeps an engine running.

The order of starting and stopping is here; requests are handled in `api`, the engine process in
`supervisor`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from vlm_server import heap
from vlm_server.api.app import create_app
from vlm_server.api.http.connection.server import SLOW_READER_SECONDS, HttpServer, http_config
from vlm_server.api.http.intake import intake
from vlm_server.api.http.openai_errors import encode
from vlm_server.api.http.tracing import start_tracer
from vlm_server.api.routes import OPERATIONS
from vlm_server.child.pool import ChildFailed
from vlm_server.cli import options, terminal
from vlm_server.cli.progress import ProgressLine
from vlm_server.cli.serve import url_of
from vlm_server.errors import ConfigError, NotAvailable
from vlm_server.settings import Server, Settings, Sources
from vlm_server.supervisor.supervisor import Supervisor

_SEND_BUFFER_BYTES = 256 * 1024
"""Of the system, per connection. What a client leaves unread is bounded beyond it."""
_TRIM_SECONDS = 10.0
_MOST_FREE_BYTES = 4 << 20
"""Of the heap: more goes back to the system, a little later."""

_PASSING = frozenset(
    {errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ENETDOWN, errno.ENETUNREACH, socket.EAI_AGAIN}
)
"""Errors of an address that another program has, or that is not up yet."""


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal arrives. Raises ConfigError or ModelLoadError."""
    settings, sources = options.load_settings_with_sources(arguments)
    settings = terminal.for_a_person(settings, sources)
    terminal.set_up_logging(settings.log)
    heap.keep_bodies()
    listener = bind(settings.server)
    asyncio.run(serve(settings, sources, listener, stop_at_eof=arguments.stop_at_eof))
    return 0


def bind(server: Server) -> socket.socket:
    """A listening socket. Raises ConfigError if the address can't be used, NotAvailable if it may
    be usable later.

    The protocol is set to TCP explicitly, unlike in `socket.create_server`: only then does
    asyncio set TCP_NODELAY. Without it the deltas of a stream are delayed by up to 40 ms.
    """
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _set_for_connections(listener)
        listener.bind((server.host, server.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        reason = str(error.strerror).partition(" (")[0]
        kind = NotAvailable if error.errno in _PASSING else ConfigError
        raise kind(
            f"can't listen on {server.host}:{server.port}: {reason}; choose with --host and --port"
        ) from None
    return listener


def _set_for_connections(listener: socket.socket) -> None:
    """Options that its connections inherit: who vanishes without a word is noticed in minutes."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
    for name, value in ((idle, 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def serve(
    settings: Settings, sources: Sources, listener: socket.socket, *, stop_at_eof: bool
) -> None:
    """Serve HTTP on `listener` until told to stop, then drain. Raises ModelLoadError."""
    tracer = start_tracer(settings.tracing, OPERATIONS)
    stop = asyncio.Event()
    stop_on_signals(stop.set)
    if stop_at_eof:
        stop_when_input_ends(stop.set)
    progress = ProgressLine(sys.stderr)
    supervisor = Supervisor(settings, on_progress=progress.show)
    intake_pool = intake.start_pool(settings.limits)
    with contextlib.suppress(ChildFailed):  # it is started when it is needed
        await asyncio.to_thread(intake_pool.warm_up)
    app = create_app(settings, supervisor, intake_pool, tracer, sources)
    server = HttpServer(http_config(app, settings, encode))
    url = url_of(settings.server.host, listener.getsockname()[1])
    print(terminal.first_words(url, supervisor.status.model_name, sys.stdout), flush=True)
    await supervisor.start()
    announcement = asyncio.create_task(announce(supervisor, progress, url, settings))
    announcement.add_done_callback(lambda task: stop.set() if _has_failed(task) else None)
    trimming = asyncio.create_task(trim_heap())
    http = asyncio.create_task(server.serve(sockets=[listener]))
    http.add_done_callback(lambda _: stop.set())
    await stop.wait()
    trimming.cancel()
    announcement.cancel()
    server.should_exit = True  # no new connections; running requests finish or fail below
    await supervisor.stop()
    server.end_within(SLOW_READER_SECONDS)
    await http
    intake_pool.close()
    if tracer is not None:
        await asyncio.to_thread(tracer.close)
    with contextlib.suppress(asyncio.CancelledError):
        await announcement


async def trim_heap() -> None:
    """Give back what bodies have left, now and then."""
    while True:
        await asyncio.sleep(_TRIM_SECONDS)
        if heap.free_bytes() > _MOST_FREE_BYTES:
            await asyncio.to_thread(heap.trim)


async def announce(
    supervisor: Supervisor, progress: ProgressLine, url: str, settings: Settings
) -> None:
    """Print the address once the model is ready. Raises ModelLoadError if it can't be loaded."""
    started = time.monotonic()
    try:
        await supervisor.wait_ready()
    finally:
        progress.clear()
    terminal.has_started()
    if sys.stdout.isatty():
        seconds = time.monotonic() - started
        print(terminal.invitation(url, seconds, settings, sys.stdout), flush=True)
    else:
        print(terminal.greeting(url, supervisor.status.model_name, settings), flush=True)


def _has_failed(task: asyncio.Task[None]) -> bool:
    return not task.cancelled() and task.exception() is not None


def stop_on_signals(stop: Callable[[], None]) -> None:
    """The first SIGTERM or SIGINT calls `stop`; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def on_first() -> None:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        stop()

    for number in signals:
        loop.add_signal_handler(number, on_first)


def stop_when_input_ends(stop: Callable[[], None]) -> None:
    """Call `stop` when stdin is closed, so that a child ends with its parent, even a killed one."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop has already ended
            loop.call_soon_threadsafe(stop)

    threading.Thread(target=wait, name="stdin", daemon=True).start()
