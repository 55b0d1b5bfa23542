"""The lane of batches: runs their lines while nothing else asks for the device.

A line is a request of its batch's key to the application itself. An interactive request, or a
strained machine, interrupts all running lines; they wait again, and lose no more than their time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar, get_args

import anyio
import anyio.to_thread
from starlette.types import ASGIApp

from vlm_server.api.batches import finish
from vlm_server.api.batches.batch import Batch
from vlm_server.api.batches.lines import Fault, LineFile
from vlm_server.api.batches.request import ask
from vlm_server.api.batches.run import Run
from vlm_server.api.batches.store import BatchStore
from vlm_server.api.fair_turns import FairOrder
from vlm_server.api.files.store import FileStore
from vlm_server.api.http.access.keys import ApiKey, KeyRing
from vlm_server.api.http.queue.gaps import Gaps
from vlm_server.errors import EngineUnavailable, NotSupported, StorageFull
from vlm_server.platform import conditions
from vlm_server.settings import BatchSettings

logger = logging.getLogger(__name__)
T = TypeVar("T")
P = ParamSpec("P")

PAUSES = (
    "interactive_requests",
    *get_args(conditions.Strain),
    "server_unavailable",
    "storage_full",
    "internal_error",
)
"""Why no line is begun, whatever its batch."""
_LOOK_SECONDS = 0.25
"""Time between two looks for a gap, and for what has been changed."""
_STRAIN_SECONDS = 5.0
_RETRY_SECONDS = 1.0
_DATABASE = "index.sqlite-batches"


class Lane:
    """All batches, and the task that runs them. Used from the event loop only."""

    def __init__(
        self, settings: BatchSettings, files: FileStore, gaps: Gaps, ring: KeyRing
    ) -> None:
        self.settings = settings
        self.paused: str | None = None
        """Why no line is begun, though some wait."""
        self.lines = Counter[str]({"completed": 0, "failed": 0, "interrupted": 0})
        """The lines that have ended since the start, by their ends."""
        self.num_active = 0
        self._files = files
        self._gaps = gaps
        self._ring = ring
        self._max_bytes = min(settings.max_output_bytes, files.max_file_bytes)
        self._store: BatchStore | None = None
        self._app: ASGIApp | None = None
        self._task: asyncio.Task[None] | None = None
        self._lines = set[asyncio.Task[None]]()
        self._runs: dict[str, Run] = {}
        self._news = asyncio.Event()
        self._order = FairOrder()
        """Of owners; a line costs 1."""
        self._strain: str | None = None
        self._strain_at = float("-inf")
        self._retry_at = float("-inf")
        self._trouble = ""
        self._is_stopped = False
        gaps.on_close = self._interrupt
        self._threads = anyio.CapacityLimiter(4)

    @property
    def num_running(self) -> int:
        """The lines that run."""
        return len(self._lines)

    def paused_of(self, batch: Batch) -> str | None:
        """Why no line of `batch` is begun; None if it need not wait."""
        if not batch.is_active:
            return None
        return "api_key_removed" if self._key(batch.owner) is None else self.paused

    def resume(self, app: ASGIApp) -> None:
        """Go on with the batches that an earlier daemon has left, if files are kept."""
        if self._files.kept_path is not None:
            with contextlib.suppress(NotSupported):
                self.begin(app)

    def begin(self, app: ASGIApp) -> BatchStore:
        """The batches, whose lines `app` now answers. Raises NotSupported,
        EngineUnavailable and StorageFull."""
        if not (self.settings.max_running and self._files.limit_bytes):
            text = "This server runs no batches (batches.max_running, files.max_bytes)"
            raise NotSupported(text)
        if self._is_stopped:
            raise EngineUnavailable("The server is stopping.")
        if self._store is None:
            self._store = BatchStore(self._files.path / _DATABASE)
        self._app = app
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        self._news.set()
        return self._store

    async def stop(self) -> None:
        """Interrupt all lines, and begin no more."""
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._interrupt()
        await asyncio.gather(*self._lines, return_exceptions=True)
        for run in self._runs.values():
            run.file.close()
        if self._store is not None:
            self._store.close()
        self._store = self._task = None

    # ---- what is to be done --------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            self._news.clear()
            seconds: float | None
            try:
                seconds = await self._advance()
            except StorageFull:
                self.paused, seconds = "storage_full", _STRAIN_SECONDS
            except Exception:
                logger.exception("batches failed unexpectedly")
                self.paused, seconds = "internal_error", _STRAIN_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._news.wait()

    async def _advance(self) -> float | None:
        """Do what can be done now; returns the seconds until there may be more."""
        assert self._store is not None
        batches = await self._run(self._store.active)
        self.num_active = len(batches)
        if not batches:
            self.paused = None
            return None
        await self._check_conditions()
        for batch in batches:
            await self._advance_batch(batch)
        if self.paused is None:
            self._begin_lines(batches)
        return _LOOK_SECONDS

    async def _check_conditions(self) -> None:
        now = time.monotonic()
        if now >= self._strain_at + _STRAIN_SECONDS:
            strain = partial(conditions.strain, on_battery=self.settings.on_battery)
            self._strain, self._strain_at = await self._run(strain), now
        self.paused = self._strain
        if self._gaps.seconds_until_open != 0:
            self.paused = self.paused or "interactive_requests"
        if time.monotonic() < self._retry_at:
            self.paused = self.paused or self._trouble
        if self._strain is not None:
            self._interrupt()

    async def _advance_batch(self, batch: Batch) -> None:
        """Move `batch` to its next state, if it is time."""
        assert self._store is not None
        now = int(time.time())
        if batch.status in ("validating", "in_progress") and batch.expires_at <= now:
            expired = {"status": "finalizing", "is_expired": True, "finalizing_at": now}
            await self._run(partial(self._store.change, batch, **expired))
            self._news.set()
        elif batch.status == "validating" and self.paused is None:
            await self._validate(batch)
        elif batch.status in ("finalizing", "cancelling"):
            await self._finish(batch)
        elif batch.status == "in_progress" and self.paused is None:
            run = self._runs.get(batch.id) or await self._open(batch)
            if run is not None and not run.waiting and not run.running:
                change = partial(self._store.change, batch, status="finalizing", finalizing_at=now)
                await self._run(change)
                self._news.set()

    def _begin_lines(self, batches: list[Batch]) -> None:
        """Begin as many lines as may run: the owners' in turn, of each one's oldest batch."""
        if self._gaps.seconds_until_open != 0:  # a request has just come
            return
        ready = {
            batch.id: (batch, self._runs[batch.id], key)
            for batch in batches
            if batch.id in self._runs and (key := self._key(batch.owner)) is not None
        }
        while len(self._lines) < self.settings.max_running:
            waiting = [each for each in ready.values() if each[1].waiting]
            if not waiting:
                return
            batch, run, key = min(waiting, key=lambda each: self._order.place(each[0].owner))
            self._order.begin(batch.owner)
            self._order.charge(batch.owner, 1)
            task = asyncio.create_task(self._run_line(batch, run, key, *run.begin()))
            self._lines.add(task)
            task.add_done_callback(self._lines.discard)

    # ---- states of a batch ---------------------------------------------------------------

    async def _validate(self, batch: Batch) -> None:
        assert self._store is not None
        lines = await self._read_lines(batch)
        if lines is None:
            return
        if lines.faults:
            lines.close()
            await self._run(finish.fail, batch, lines.faults, self._store)
            return
        now, total = int(time.time()), len(lines)
        change = partial(
            self._store.change, batch, status="in_progress", in_progress_at=now, total=total
        )
        if await self._run(change):
            self._runs[batch.id] = Run(batch, lines, ())
        else:
            lines.close()
        self._news.set()

    async def _open(self, batch: Batch) -> Run | None:
        """The lines of a batch that an earlier daemon has begun."""
        assert self._store is not None
        lines = await self._read_lines(batch)
        if lines is None:
            return None
        done = await self._run(self._store.done_lines, batch)
        run = self._runs[batch.id] = Run(batch, lines, done)
        self._news.set()
        return run

    async def _read_lines(self, batch: Batch) -> LineFile | None:
        """The checked file of `batch`, which fails if that is gone; None also if a gap ends."""
        assert self._store is not None
        file = await self._run(self._files.find, batch.owner, batch.input_file_id)
        reader = None if file is None else await self._run(self._files.open, file)
        if reader is None:
            text = f"The input file `{batch.input_file_id}` has been deleted."
            await self._run(
                finish.fail, batch, [Fault("file_not_found", text, None, "input_file_id")],
                self._store,
            )  # fmt: skip
            return None
        lines = LineFile(reader, batch.endpoint, self.settings)
        try:
            while await self._run(lines.check_some):
                if self._gaps.seconds_until_open != 0:
                    lines.close()
                    return None
        except BaseException:
            lines.close()
            raise
        return lines

    async def _finish(self, batch: Batch) -> None:
        """Write the files of a batch once none of its lines runs."""
        assert self._store is not None
        if (run := self._runs.get(batch.id)) is not None and run.running:
            run.interrupt()
            return
        if batch.is_expired or (batch.is_messages and batch.status == "cancelling"):
            file = run.file if run is not None else await self._read_lines(batch)
            if file is None:
                return
            await self._run(finish.record_unfinished, batch, file, self._store)
            stored = await self._run(self._store.find, batch.owner, batch.id)
            assert stored is not None
            batch = stored
        await self._run(finish.finish, batch, self._store, self._files)
        if run is not None:
            run.file.close()
            del self._runs[batch.id]
        self._news.set()

    # ---- lines ---------------------------------------------------------------------------

    async def _run_line(
        self, batch: Batch, run: Run, key: ApiKey, index: int, interrupted: asyncio.Event
    ) -> None:
        assert self._app is not None
        assert self._store is not None
        try:
            line = await self._run(run.file.read, index)
            await self._run(self._files.find, batch.owner, batch.input_file_id)  # it is in use
            reply = await ask(self._app, key, batch.endpoint, bytes(line.body), interrupted)
            if not reply.status:
                run.put_back(index)
                self.lines["interrupted"] += 1
            elif run.may_retry(index, reply):
                run.put_back(index)
                self._wait("server_unavailable")
            else:
                kind, data = run.result(line.custom_id, reply, self._max_bytes)
                await self._run(self._store.add_results, batch, [(index, kind, data)])
                self.lines[kind] += 1
        except StorageFull:
            run.put_back(index)
            self._wait("storage_full")
        except Exception:
            logger.exception("a line of a batch failed unexpectedly")
            run.put_back(index)
            self._wait("internal_error")
        finally:
            del run.running[index]
            self._news.set()

    def _wait(self, trouble: str) -> None:
        self._trouble, self._retry_at = trouble, time.monotonic() + _RETRY_SECONDS

    def _interrupt(self) -> None:
        for run in self._runs.values():
            run.interrupt()

    def _key(self, owner: str) -> ApiKey | None:
        return self._ring.of_identity(owner)

    async def _run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function`, which uses the disk, on a thread."""
        call = partial(function, *args, **kwargs)
        return await anyio.to_thread.run_sync(call, limiter=self._threads)
