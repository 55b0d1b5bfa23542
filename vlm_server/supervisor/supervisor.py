"""Keeps one engine process running and passes requests to it.

The engine may die at any moment. Requests in flight then end with `Failed("engine_died")`, new
ones are answered 503 with Retry-After, and another engine is started after a pause that doubles
each time. An engine that makes no progress is ended (`watchdog`). Requests of a size that crashed
engines again and again are refused: `quarantine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable
from functools import partial
from pathlib import Path

import msgspec

from vlm_server.errors import EngineUnavailable, ModelLoadError
from vlm_server.hub.names import served_name
from vlm_server.platform import log_tail, machine
from vlm_server.platform.private_folder import PrivateFolder
from vlm_server.protocol import (
    ENCODER,
    LAST_WRITES_SECONDS,
    PREPARERS,
    Abort,
    Accepted,
    ClearCaches,
    Drain,
    Event,
    Failed,
    Finished,
    Loading,
    LogLine,
    OnDevice,
    Ready,
    SetMemoryLimit,
    Stats,
    Tokens,
    Unloadable,
)
from vlm_server.protocol.commands import Rank
from vlm_server.settings import Settings
from vlm_server.supervisor.engine_process.client import EngineRequest, EngineStatus, RequestEvent
from vlm_server.supervisor.engine_process.history import (
    MAX_ENDS,
    EngineEnd,
    FailedStarts,
    MemoryHistory,
    reason_of_end,
)
from vlm_server.supervisor.engine_process.process import EngineProcess
from vlm_server.supervisor.engine_process.ranks import RankProcesses
from vlm_server.supervisor.engine_process.start import for_models, start_of
from vlm_server.supervisor.engine_process.watchdog import Watchdog
from vlm_server.supervisor.engine_streams import EngineStreams
from vlm_server.supervisor.quarantine import Quarantine

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[str, float], None]

_LAST_SECONDS = LAST_WRITES_SECONDS + 1.0
"""Time for an engine without requests to exit by itself."""
_FAILED = 1
"""The exit status of an engine that gave up."""
_STARTING = "starting"
_STOPPED = "stopped"


class Supervisor:
    """The `EngineClient` of one model. Use from one event loop.

    `on_progress(stage, fraction)` is called while the model loads; an empty stage is the end.
    """

    def __init__(
        self,
        settings: Settings,
        on_progress: ProgressCallback,
        private: PrivateFolder | None = None,
    ) -> None:
        """private: a folder that several engines share; the caller closes it."""
        self._settings = settings
        self._start = start_of(settings)
        self._told_limit_bytes = 0
        self._on_progress = on_progress
        name = settings.model.name or served_name(Path(self._start.model.path))
        self._status = EngineStatus("stopped", name)
        self._process: EngineProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._quarantine = Quarantine(settings.engine.quarantine_seconds, time.monotonic)
        self._in_flight = EngineStreams(self._quarantine)
        self._memory = MemoryHistory()
        self._tick_seconds = min(1.0, settings.engine.silence_timeout_seconds / 4)
        self._watchdog = Watchdog(self._tick_seconds, time.monotonic)
        self._hung: str | None = None
        """The kind of threads for which the last engine was ended; `_STOPPED` if it was stopped."""
        self._private = private or PrivateFolder()
        self._closes_private = private is None
        self._failed_starts = FailedStarts(machine.memory_bytes())
        self._settled = asyncio.Event()
        self._unloadable: ModelLoadError | None = None
        self._was_ready = False
        self._started_at = 0.0
        self._start_seconds = 0.0
        """Seconds that the last engine took to start."""

    @property
    def status(self) -> EngineStatus:
        status = dataclasses.replace(
            self._status,
            quarantined_shapes=self._quarantine.num_shapes,
            quarantine_refusals=self._quarantine.num_refused,
            memory_samples=self._memory.samples,
        )
        timeout = self._settings.engine.silence_timeout_seconds
        overdue, _ = self._watchdog.overdue_seconds
        if not status.is_ready or overdue <= timeout / 2:
            return status
        seconds = max(0.0, timeout - overdue) + self._start_seconds
        return dataclasses.replace(status, state="unresponsive", retry_after_seconds=seconds)

    @property
    def num_in_flight(self) -> int:
        """Number of requests that have neither finished nor failed."""
        return len(self._in_flight)

    async def start(self) -> None:
        """Start the engine; the model loads in the background."""
        self._set(state="starting")
        self._task = asyncio.create_task(self._keep_running(), name="supervisor")

    async def wait_ready(self) -> None:
        """Wait until the engine is ready.

        Raises ModelLoadError if the model can't be loaded.
        """
        await self._settled.wait()
        if self._unloadable is not None:
            raise self._unloadable

    async def stop(self) -> None:
        """Let running requests finish within `server.drain_timeout_seconds`, then end the engine.

        An engine that is idle by then gets some seconds to finish its writes to disk. This goes on
        even if the caller is cancelled; several callers may wait for it.
        """
        if self._ending is None:
            self._ending = asyncio.create_task(self._stop(), name="ending the engine")
        await asyncio.shield(self._ending)

    async def _stop(self) -> None:
        self._set(state="stopping")
        if self._process is not None and self._was_ready:
            await self._drain(self._process)
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._closes_private:
            self._private.close()
        self._set(state="stopped", pid=None)

    async def stream(self, request: EngineRequest) -> AsyncGenerator[RequestEvent, None]:
        process, request_id = self._running_process(), request.submit.request_id
        queue = self._in_flight.open(request_id, request.shape)
        event: RequestEvent | None = None
        try:
            self._watchdog.record_request(request_id)
            process.send(request.submit)
            del request  # its images are not needed here while it is answered
            while not isinstance(event, Finished | Failed):
                event = await queue.get()
                yield event
        finally:
            was_here = self._in_flight.close(request_id)
            if was_here and not isinstance(event, Finished | Failed):
                self._abort(process, request_id)

    def cancel(self, request_id: str) -> bool:
        process = self._process
        if process is None or not self._in_flight.cancel(request_id):
            return False
        self._abort(process, request_id)
        return True

    def set_memory_limit(self, limit_bytes: int) -> None:
        """Limit the device memory of the engine, and of those started later."""
        memory = msgspec.structs.replace(self._start.memory, max_bytes=limit_bytes)
        self._start = msgspec.structs.replace(self._start, memory=memory)
        self._tell_limit()

    def _tell_limit(self) -> None:
        """Send the limit to an engine that is ready and has another one."""
        limit_bytes = self._start.memory.known_limit_bytes
        if self._process is not None and self._was_ready and limit_bytes != self._told_limit_bytes:
            self._told_limit_bytes = limit_bytes
            self._process.send(SetMemoryLimit(limit_bytes))

    def clear_caches(self) -> None:
        """Drop unused cache entries. Raises EngineUnavailable if there is no engine."""
        self._running_process().send(ClearCaches())

    def _running_process(self) -> EngineProcess:
        """The engine. Raises EngineUnavailable if there is none, or it does not respond."""
        status = self.status
        if self._process is None or not status.is_ready:
            raise EngineUnavailable(f"The engine is not ready: {status.state}.")
        return self._process

    def _abort(self, process: EngineProcess, request_id: str) -> None:
        """Abort a request whose client has left, if the engine has it."""
        if request_id in self._watchdog.owed and not process.withdraw(request_id):
            process.send(Abort(request_id))
        else:
            self._watchdog.record_end(request_id)
            self._in_flight.remove(request_id)

    # ---- the engine's life ---------------------------------------------------------

    async def _drain(self, process: EngineProcess) -> None:
        process.send(Drain())
        if not await process.flush(_LAST_SECONDS):
            logger.warning("the engine does not respond: ending it")
            return
        if count := self.num_in_flight:
            seconds = self._settings.server.drain_timeout_seconds
            logger.info("stopping: waiting up to %.0f s for %d requests", seconds, count)
            await process.wait(seconds)
        if not self.num_in_flight:
            await process.wait(_LAST_SECONDS)

    async def _keep_running(self) -> None:
        engine = self._settings.engine
        pause = engine.min_restart_backoff_seconds
        find = partial(for_models, self._private, engine)
        while True:
            self._was_ready = False
            self._hung = None
            self._exit_status: int | None = None
            try:
                await self._run_once(await asyncio.to_thread(find))
            except Exception:  # a process that can't be started, an event that can't be read
                logger.exception("running the engine failed")
            was_late = self._hung == _STARTING
            reason = self._failed_starts.record_end(self._exit_status, was_late=was_late)
            if reason is not None:
                self._handle_unloadable(reason)
            if self._status.state in ("failed", "stopping"):
                return
            if self._was_ready:
                pause = engine.min_restart_backoff_seconds
            end = EngineEnd(time.time(), reason_of_end(self._exit_status, self._hung))
            self._set(
                ends=(*self._status.ends, end)[-MAX_ENDS:],
                restarts=self._status.restarts + 1,
                retry_after_seconds=max(1.0, pause + self._start_seconds),
            )
            await asyncio.sleep(pause)
            pause = min(2 * pause, engine.max_restart_backoff_seconds)

    async def _run_once(self, environment: dict[str, str]) -> None:
        """Run one engine from start to end; afterwards no request is in flight."""
        self._started_at = time.monotonic()
        self._hung = None
        self._watchdog = Watchdog(self._tick_seconds, time.monotonic)
        ranks = await RankProcesses.start(self._settings, environment)
        try:
            process = await self._start_process(environment)
            watching_ranks = asyncio.create_task(self._watch_ranks(ranks, process))
            try:
                await self._run_process(process, ranks.rank_zero)
            finally:
                watching_ranks.cancel()
        finally:
            await ranks.end()

    async def _watch_ranks(self, ranks: RankProcesses, process: EngineProcess) -> None:
        """End an engine that has lost a rank: it may wait for it forever."""
        reason = await ranks.first_to_end()
        if not self._was_ready:
            self._handle_unloadable(reason)
        process.kill()

    async def _run_process(self, process: EngineProcess, rank: Rank | None) -> None:
        self._process = process
        watching = asyncio.create_task(self._watch(process))
        try:
            if self._status.state != "stopping":
                self._set(pid=process.pid, progress=("starting", 0.0))
            process.send(msgspec.structs.replace(self._start, rank=rank))
            self._told_limit_bytes = self._start.memory.known_limit_bytes
            async for event in process.events():
                self._watchdog.record_event(event)
                self._handle(event)
        finally:
            self._process = None
            level = logging.ERROR if self._handle_engine_end() else logging.INFO
            watching.cancel()
            status = self._exit_status = await process.end()
            reason = reason_of_end(status, self._hung)
            logger.log(level, "the engine process %d %s", process.pid, reason)
            if status == _FAILED:
                await asyncio.to_thread(self._private.forget_kernels)

    async def _start_process(self, environment: dict[str, str]) -> EngineProcess:
        return await EngineProcess.start("vlm_server.engine", environment)

    async def _watch(self, process: EngineProcess) -> None:
        """End an engine that is not ready in time, or makes no progress."""
        engine = self._settings.engine
        num_ticks = 0
        while True:
            await asyncio.sleep(self._tick_seconds)
            self._watchdog.tick()
            num_ticks += 1
            seconds, kind = self._watchdog.overdue_seconds
            if not self._was_ready:
                seconds, kind = num_ticks * self._tick_seconds, _STARTING
            limit = engine.silence_timeout_seconds
            if seconds > (limit if self._was_ready else engine.start_timeout_seconds):
                await self._end_hung(process, kind, seconds)
                return

    async def _end_hung(self, process: EngineProcess, kind: str, seconds: float) -> None:
        logger.error("the engine does not respond: %s hangs for %.0f s: ending it", kind, seconds)
        self._hung = kind
        try:
            if await process.is_stopped():
                logger.error("a signal or a debugger has stopped it: its stacks can't be shown")
                self._hung = _STOPPED
            else:
                await process.show_stacks()
        finally:
            process.kill()

    def _handle(self, event: Event) -> None:
        match event:
            case Accepted() | OnDevice() | Tokens():
                self._in_flight.deliver(event)
            case Finished() | Failed():
                self._watchdog.record_end(event.request_id)
                self._in_flight.deliver(event)
            case Stats():
                self._memory.add(event.memory, event.generated_tokens)
                self._set(stats=event)
            case Loading(stage, fraction):
                self._set(progress=(stage, fraction))
            case Ready():
                self._handle_ready(event)
            case Unloadable(reason):
                self._handle_unloadable(reason)
            case LogLine(created, level, text):
                log_tail.keep_engine_line(self._status.model_name, created, level, text)

    def _handle_ready(self, event: Ready) -> None:
        drafter = f", with the drafter {event.facts.drafter}" if event.facts.drafter else ""
        logger.info("the engine is ready: %s on %s%s", event.model_type, event.device, drafter)
        self._was_ready = True
        self._tell_limit()
        self._failed_starts.record_ready()
        self._start_seconds = time.monotonic() - self._started_at
        self._set(model_facts=event.facts)
        if self._status.state != "stopping":
            self._set(state="ready", progress=None, retry_after_seconds=1.0)
        self._settled.set()

    def _handle_unloadable(self, reason: str) -> None:
        """Give up on a model that was never loaded; one that was ready before is tried again."""
        logger.error("the model can't be loaded: %s", reason)
        if not self._settled.is_set() and self._status.state != "stopping":
            self._unloadable = ModelLoadError(reason)
            self._set(state="failed", progress=None)
            self._settled.set()

    def _handle_engine_end(self) -> bool:
        """Fail the requests in flight, and refuse new ones; whether the engine ended by itself."""
        is_death = self._status.state not in ("failed", "stopping")
        is_crash = is_death and self._hung not in (PREPARERS, _STOPPED)
        self._in_flight.fail_all(is_crash=is_crash, only_encoder=self._hung == ENCODER)
        self._watchdog = Watchdog(self._tick_seconds, time.monotonic)
        if is_death:
            self._set(
                state="restarting", stats=None, retry_after_seconds=max(1.0, self._start_seconds)
            )
        self._set(pid=None, progress=None)
        return is_death

    def _set(self, **changes: object) -> None:
        self._status = dataclasses.replace(self._status, **changes)  # type: ignore[arg-type]
        if "progress" in changes:
            self._on_progress(*(self._status.progress or ("", 1.0)))
