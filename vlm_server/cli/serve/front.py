"""The front process of `vlm-server serve`: its start and its stop, in order."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.applications import Starlette

from vlm_server.api.app import create_app
from vlm_server.api.batches.lane import Lane
from vlm_server.api.dialects.openai.watch.watches import Watches
from vlm_server.api.files.store import FileStore
from vlm_server.api.http.connection.server import (
    PARSING_SECONDS,
    SLOW_READER_SECONDS,
    HttpServer,
)
from vlm_server.api.http.queue.queue_slots import QueueSlots
from vlm_server.api.http.streams.event_logs import EventLogs
from vlm_server.api.http.tracing import start_tracer
from vlm_server.api.parsing import body_parser
from vlm_server.api.routes import OPERATIONS
from vlm_server.cli import log, options
from vlm_server.cli.client import own_daemons
from vlm_server.cli.client.daemon import url_of
from vlm_server.cli.main import discard_output
from vlm_server.cli.progress import ProgressLine
from vlm_server.cli.serve import greeting
from vlm_server.cli.serve.listener import Listener, check_exposure, listen, with_inherited_address
from vlm_server.cli.serve.reload import (
    Reloader,
    Shutdown,
    start_again,
    stop_on_signals,
    stop_when_input_ends,
)
from vlm_server.cli.text import say
from vlm_server.errors import StorageFull
from vlm_server.platform import backend, heap
from vlm_server.platform.child.pool import ChildFailed
from vlm_server.platform.log_tail import LogTail
from vlm_server.platform.terminal import CLEAR_LINE
from vlm_server.settings import Settings, Sources, default_file
from vlm_server.supervisor.models.model_pool import ModelPool

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 10.0
"""Time between two checks of the heap, the limit on open files, the log and the settings."""
_MAX_FREE_BYTES = 4 << 20
"""Free heap beyond which it is returned to the system."""
_HOLD_SECONDS = 30.0
"""Time for which clients of an inherited socket wait for the model before they get an error."""
_HOLD_LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class _Process:
    settings: Settings
    sources: Sources
    settings_file: Path
    listener: Listener
    reloader: Reloader | None
    log_file: log.LogFile | None
    log_tail: LogTail


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal arrives. Raises ConfigError or ModelLoadError."""
    log_file = log.LogFile(arguments.log_file) if arguments.log_file else None
    settings_file = arguments.config or default_file(os.environ)
    reloader = Reloader(settings_file) if arguments.reload else None
    settings, sources = options.load_settings_with_sources(arguments)
    options.check_memory_limit(settings)
    settings = log.with_terminal_log(settings, sources)
    backend.check()
    log_tail = log.set_up_logging(settings.log)
    if places := dict.fromkeys(sources.values()):
        logger.info("settings from %s", ", ".join(places))
    heap.keep_bodies()
    listener = listen(settings.server, os.environ, arguments.launchd_socket)
    if reloader is not None:
        reloader.check_with(settings, lambda: _load_for(listener, arguments))
    server = with_inherited_address(settings.server, listener)
    settings = msgspec.structs.replace(settings, server=server)
    process = _Process(settings, sources, settings_file, listener, reloader, log_file, log_tail)
    url = url_of(server.host, listener.addresses[0][1])
    is_temporary = arguments.stop_at_eof
    with contextlib.nullcontext() if is_temporary else own_daemons.listed(url):
        is_restart = asyncio.run(serve(process, stop_at_eof=is_temporary))
    if is_restart:
        start_again(listener)
    if not is_temporary and sys.stderr.isatty():
        say("Stopped.")
    return 0


def _load_for(listener: Listener, arguments: argparse.Namespace) -> Settings:
    """New settings. Raises ConfigError or ModelLoadError if they can't be served on `listener`."""
    settings = options.load_settings(arguments)
    options.check_memory_limit(settings)
    check_exposure(settings.server, listener)
    return settings


async def serve(process: _Process, *, stop_at_eof: bool) -> bool:
    """Serve HTTP until the stop, then drain; returns whether to start again.

    Raises ModelLoadError.
    """
    settings, listener = process.settings, process.listener
    tracer = start_tracer(settings.tracing, OPERATIONS)
    stop = asyncio.Event()
    end = Shutdown(stop.set)
    stop_on_signals(end.stop)
    if stop_at_eof:
        stop_when_input_ends(end.stop)
    if process.reloader is not None:
        process.reloader.listen(end.start_again)
    files = FileStore(settings.files)
    progress = ProgressLine(sys.stderr)
    models = ModelPool(settings, on_progress=progress.show)
    parsing_pool = body_parser.start_pool(settings.limits)
    with contextlib.suppress(ChildFailed):  # started on demand instead
        await asyncio.to_thread(parsing_pool.warm_up)
    app = create_app(
        *(settings, models, parsing_pool, tracer, process.sources, files, process.log_tail),
        settings_file=process.settings_file,
    )
    server = HttpServer(app, settings)
    url = url_of(settings.server.host, listener.addresses[0][1])
    first = greeting.first_words(url, models.names, settings, sys.stdout, process.sources)
    _say(first)
    await models.start()
    lane: Lane = app.state.lane
    lane.resume(app)
    announcement = asyncio.create_task(announce(models, url, settings))

    def end_if_failed(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            stop.set()

    announcement.add_done_callback(end_if_failed)
    looking = asyncio.create_task(look_after(process, server, files))
    http = asyncio.create_task(serve_http(server, listener, models, stop))
    http.add_done_callback(lambda _: stop.set())
    await stop.wait()
    if end.is_stop and not stop_at_eof and sys.stderr.isatty():
        progress.clear()
        slots: QueueSlots = app.state.queue_slots
        num_requests = max(models.num_in_flight, slots.requests.taken)
        seconds = settings.server.drain_timeout_seconds
        sys.stderr.write(CLEAR_LINE)
        say(greeting.stopping(num_requests, seconds))
    looking.cancel()
    announcement.cancel()
    await drain(app, server, models, settings, is_replaced=listener.is_inherited)
    server.should_exit = True
    server.end_within(SLOW_READER_SECONDS)
    await http
    parsing_pool.close()
    await asyncio.to_thread(files.close)
    if tracer is not None:
        await asyncio.to_thread(tracer.close)
    with contextlib.suppress(asyncio.CancelledError):
        await announcement
    return end.is_restart


async def drain(
    app: Starlette,
    server: HttpServer,
    models: ModelPool,
    settings: Settings,
    *,
    is_replaced: bool,
) -> None:
    """Let running requests finish or fail, and end the engines.

    is_replaced: whether another process takes new connections from the same sockets.
    """
    lane: Lane = app.state.lane
    await lane.stop()
    watches: Watches = app.state.watches
    await watches.close()
    logs: EventLogs = app.state.event_logs

    def num_in_engine() -> int:
        return models.num_in_flight + models.num_waiting - logs.num_detached

    if is_replaced:
        await server.last_call(num_in_engine)
        server.should_exit = True
    else:
        server.drain()
        drain_seconds = settings.server.drain_timeout_seconds
        await server.hand_over(num_in_engine, min(PARSING_SECONDS, drain_seconds))
    await models.stop()


async def serve_http(
    server: HttpServer, listener: Listener, models: ModelPool, stop: asyncio.Event
) -> None:
    """Answer clients; on an inherited socket only once the model is loaded, since they wait there.

    The wait is at most `_HOLD_SECONDS`, and not for a download: a restart fails no client.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_HOLD_SECONDS if listener.is_inherited else 0):
            while models.is_starting and not stop.is_set():  # noqa: ASYNC110
                await asyncio.sleep(_HOLD_LOOK_SECONDS)
    if not stop.is_set():
        await server.serve(sockets=list(listener.sockets))


async def look_after(process: _Process, server: HttpServer, files: FileStore) -> None:
    """Periodically return free heap, drop old files, rotate the log, apply limits and settings."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        server.apply_file_limit()
        with contextlib.suppress(StorageFull):  # it is in the log
            await asyncio.to_thread(files.drop_expired)
        if heap.free_bytes() > _MAX_FREE_BYTES:
            await asyncio.to_thread(heap.trim)
        if process.log_file is not None:
            await asyncio.to_thread(process.log_file.rotate_if_large)
        if process.reloader is not None:
            await process.reloader.check_file()


async def announce(models: ModelPool, url: str, settings: Settings) -> None:
    """Print the address once models are ready. Raises ModelLoadError if one can't be loaded."""
    started_at = time.monotonic()
    await models.wait_ready()
    log.has_started()
    seconds = time.monotonic() - started_at
    _say(greeting.ready(url, seconds, settings, models.status(models.names[0]), sys.stdout))


def _say(text: str) -> None:
    """Print `text`; a closed or full output does not stop the server."""
    try:
        print(text, flush=True)
    except OSError as error:
        logger.warning("can't write the output: %s", error.strerror)
        discard_output()
