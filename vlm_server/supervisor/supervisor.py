"""Keeps one engine process running and passes requests to it.

The engine may die at any moment. Requests in flight then end with `Failed("engine_died")`, new
ones are answered 503 with Retry-After, and another engine is started after a pause that doubles
each time. Requests of a size that crashed two engines are refused: see `quarantine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import msgspec

from vlm_server.errors import EngineDied, EngineUnavailable, ModelLoadError
from vlm_server.models import EMBEDDED
from vlm_server.protocol import (
    LAST_WRITES_SECONDS,
    Abort,
    Accepted,
    Drain,
    Event,
    Failed,
    Finished,
    Loading,
    Ready,
    Start,
    Stats,
    Tokens,
    Unloadable,
    Working,
)
from vlm_server.settings import Settings
from vlm_server.supervisor.client import EngineRequest, EngineStatus, RequestEvent
from vlm_server.supervisor.openblas import find_preload
from vlm_server.supervisor.process import EngineProcess
from vlm_server.supervisor.quarantine import Quarantine

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[str, float], None]

_LAST_SECONDS = LAST_WRITES_SECONDS + 1.0
"""Time for an engine without requests to exit by itself."""


class Supervisor:
    """The `EngineClient` of one model. Use from one event loop.

    `on_progress(stage, fraction)` is called while the model loads.
    """

    def __init__(self, settings: Settings, on_progress: ProgressCallback) -> None:
        path = Path(settings.model.path) if settings.model.path else EMBEDDED
        self._settings = settings
        self._start = Start(
            model=msgspec.structs.replace(settings.model, path=str(path.absolute())),
            scheduler=settings.scheduler,
            engine=settings.engine,
            memory=settings.memory,
            log=settings.log,
            video=settings.video,
            cache=settings.cache,
        )
        self._on_progress = on_progress
        self._status = EngineStatus("stopped", settings.model.name or path.absolute().name)
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._streams: dict[str, asyncio.Queue[RequestEvent]] = {}
        self._quarantine = Quarantine(settings.engine.quarantine_seconds, time.monotonic)
        self._settled = asyncio.Event()
        self._unloadable: str | None = None
        self._was_ready = False
        self._heard_at = self._asked_at = self._started_at = 0.0
        self._start_seconds = 0.0
        """How long the last engine took to start."""

    @property
    def status(self) -> EngineStatus:
        return dataclasses.replace(
            self._status,
            quarantined_shapes=self._quarantine.num_shapes,
            quarantine_refusals=self._quarantine.num_refused,
        )

    @property
    def num_in_flight(self) -> int:
        """Number of requests that have neither finished nor failed."""
        return len(self._streams)

    async def start(self) -> None:
        """Start the engine; it loads in the background."""
        self._set(state="starting")
        self._task = asyncio.create_task(self._keep_running(), name="supervisor")

    async def wait_ready(self) -> None:
        """Wait until the engine is ready. Raises ModelLoadError if the model can't be loaded."""
        await self._settled.wait()
        if self._unloadable is not None:
            raise ModelLoadError(self._unloadable)

    async def stop(self) -> None:
        """Let running requests finish within `server.drain_seconds`, then end the engine.

        An engine that is idle by then gets some seconds to finish its writes to disk.
        """
        self._set(state="stopping")
        if self._process is not None and self._was_ready:
            await self._drain(self._process)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._set(state="stopped", pid=None)

    async def stream(self, request: EngineRequest) -> AsyncGenerator[RequestEvent, None]:
        """See `EngineClient.stream`."""
        process = self._process
        if process is None or not self._status.is_ready:
            raise EngineUnavailable(f"The engine is not ready: {self._status.state}.")
        request_id = request.submit.request_id
        self._quarantine.admit(request_id, request.shape)
        queue: asyncio.Queue[RequestEvent] = asyncio.Queue()
        self._streams[request_id] = queue
        self._asked_at = time.monotonic()
        event: RequestEvent | None = None
        try:
            await process.send(request.submit)
            del request  # its images are not needed here while it is answered
            while not isinstance(event, Finished | Failed):
                event = await queue.get()
                yield event
        finally:
            was_here = self._streams.pop(request_id, None) is not None
            if was_here and not isinstance(event, Finished | Failed):
                await process.send(Abort(request_id))

    # ---- the engine's life ---------------------------------------------------------

    async def _drain(self, process: EngineProcess) -> None:
        try:
            await asyncio.wait_for(process.send(Drain()), _LAST_SECONDS)
        except TimeoutError:
            logger.warning("the engine does not respond: ending it")
            return
        if self._streams:
            seconds = self._settings.server.drain_seconds
            count = len(self._streams)
            logger.info("stopping: waiting up to %.0f s for %d requests", seconds, count)
            await process.wait(seconds)
        if not self._streams:
            await process.wait(_LAST_SECONDS)

    async def _keep_running(self) -> None:
        engine = self._settings.engine
        pause = engine.restart_backoff_seconds
        use_openblas = engine.openblas == "auto"
        environment = await asyncio.to_thread(find_preload) if use_openblas else {}
        while True:
            try:
                await self._run_once(environment)
            except Exception:  # a process that can't be started, an event that can't be read
                logger.exception("running the engine failed")
            if self._status.state in ("failed", "stopping"):
                return
            if self._was_ready:
                pause = engine.restart_backoff_seconds
            restarts = self._status.restarts + 1
            self._set(restarts=restarts, retry_after_seconds=pause + self._start_seconds)
            await asyncio.sleep(pause)
            pause = min(2 * pause, engine.restart_backoff_max_seconds)

    async def _run_once(self, environment: dict[str, str]) -> None:
        """Run one engine from start to end; afterwards no request is in flight."""
        self._was_ready = False
        self._started_at = time.monotonic()
        process = self._process = await EngineProcess.start(environment)
        watchdog = asyncio.create_task(self._watch(process))
        try:
            if self._status.state != "stopping":
                self._set(pid=process.pid, progress=("starting", 0.0))
            await process.send(self._start)
            async for event in process.events():
                self._heard_at = time.monotonic()
                self._take(event)
        finally:
            self._process = None
            self._lose(process)
            watchdog.cancel()
            status = await process.end()
            logger.info("the engine process %d ended with status %d", process.pid, status)

    async def _watch(self, process: EngineProcess) -> None:
        """End an engine that does not get ready, or sends nothing while it has requests."""
        engine = self._settings.engine
        started = time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, engine.silence_timeout_seconds / 4))
            if not self._was_ready:
                is_late = time.monotonic() - started > engine.start_timeout_seconds
            else:
                since = max(self._heard_at, self._asked_at)
                silence = time.monotonic() - since if self._streams else 0.0
                is_late = silence > engine.silence_timeout_seconds
            if is_late:
                logger.error("the engine does not respond: ending it")
                await process.end()
                return

    def _take(self, event: Event) -> None:
        match event:
            case Tokens(deltas):
                for delta in deltas:
                    self._quarantine.acquit(delta.request_id)
                    self._deliver(delta.request_id, Tokens((delta,)))
            case Accepted():
                self._deliver(event.request_id, event)
            case Finished():
                self._quarantine.finish(event.request_id)
                self._deliver(event.request_id, event)
            case Failed():
                self._quarantine.acquit(event.request_id)
                self._deliver(event.request_id, event)
            case Working(request_ids):
                logger.debug("the device works on %s", ", ".join(request_ids))
                self._quarantine.working(request_ids)
            case Stats():
                self._set(stats=event)
            case Loading(stage, fraction):
                self._set(progress=(stage, fraction))
                self._on_progress(stage, fraction)
            case Ready():
                self._take_ready(event)
            case Unloadable(reason):
                self._take_unloadable(reason)

    def _take_ready(self, ready: Ready) -> None:
        logger.info("the engine is ready: %s on %s", ready.model_type, ready.device)
        self._was_ready = True
        self._start_seconds = time.monotonic() - self._started_at
        if self._status.state != "stopping":
            self._set(state="ready", progress=None, retry_after_seconds=1.0)
        self._settled.set()

    def _take_unloadable(self, reason: str) -> None:
        """The model can't be loaded: final for one that never was, retried for one that was."""
        logger.error("the model can't be loaded: %s", reason)
        if not self._settled.is_set() and self._status.state != "stopping":
            self._unloadable = reason
            self._set(state="failed", progress=None)
            self._settled.set()

    def _deliver(self, request_id: str, event: RequestEvent) -> None:
        if queue := self._streams.get(request_id):
            queue.put_nowait(event)

    def _lose(self, process: EngineProcess) -> None:
        """The engine process has ended: fail the requests in flight, refuse new ones."""
        is_death = self._status.state not in ("failed", "stopping")
        self._quarantine.engine_ended(is_death=is_death)
        if is_death:
            logger.error("the engine process %d ended unexpectedly", process.pid)
            self._set(
                state="restarting", stats=None, retry_after_seconds=max(1.0, self._start_seconds)
            )
        self._set(pid=None)
        error = EngineDied("The engine process ended during this request; please try again.")
        for request_id, queue in self._streams.items():
            queue.put_nowait(Failed(request_id, error.code, error.message))
        self._streams.clear()

    def _set(self, **changes: object) -> None:
        self._status = dataclasses.replace(self._status, **changes)  # type: ignore[arg-type]
