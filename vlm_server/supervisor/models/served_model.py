"""One served model: its checkpoint, its engine while it is loaded, and the requests for it."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path

import msgspec

from vlm_server.errors import (
    EngineUnavailable,
    ModelDoesNotFit,
    ModelLoadError,
    QueueTimeout,
    RequestCancelled,
    RequestError,
    VlmServerError,
)
from vlm_server.hub.download import fetch
from vlm_server.hub.messages import Progress
from vlm_server.hub.names import served_name, to_download
from vlm_server.models import EMBEDDED
from vlm_server.platform.private_folder import PrivateFolder
from vlm_server.protocol import ModelFacts
from vlm_server.settings import Settings
from vlm_server.supervisor.engine_process.client import EngineState, EngineStatus
from vlm_server.supervisor.supervisor import ProgressCallback, Supervisor

_DOWNLOAD_SECONDS = 10.0
"""Time after which clients may ask again during a download."""
_FIRST_PAUSE_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 300.0
"""Pauses after failed loads: the first one, which doubles, and the longest."""


MakeEngine = Callable[[Settings, ProgressCallback, PrivateFolder], Supervisor]


class ModelPhase(Enum):
    """The phase of a served model: each is followed by the next, and the last by the first."""

    UNLOADED = auto()
    LOADING = auto()
    """Waits to be loaded, is downloaded, or starts. Ends in `UNLOADED` if that fails."""
    LOADED = auto()
    """Takes requests: its engine was ready once, and is restarted if it ends."""
    CLOSING = auto()
    """Is unloaded once its requests are done: later ones wait for the next load."""


class ServedModel:
    """Changed only by `ModelPool`, from one event loop.

    A pinned model is loaded at the start and stays. Other models are loaded on demand, and may be
    unloaded when unused.
    """

    def __init__(
        self,
        settings: Settings,
        on_progress: ProgressCallback,
        make_engine: MakeEngine,
    ) -> None:
        """settings.model: what is loaded."""
        path = Path(settings.model.path) if settings.model.path else EMBEDDED
        self._hub_name = None if path.exists() else to_download(settings.model.path)
        name = self._hub_name.repo if self._hub_name else served_name(path.absolute())
        self.name = settings.model.name or name
        self.is_pinned = settings.model.pinned
        self.aliases = settings.model.aliases
        keep_alive = settings.model.keep_alive_seconds
        self._keep_alive_seconds = -1.0 if keep_alive is None else keep_alive
        self.wanted_seconds: float | None = None
        """The keep-alive that the last request with one has set; reset when it is unloaded."""
        self.settings = settings
        self._on_progress = on_progress
        self._make_engine = make_engine
        self._status = EngineStatus("unloaded", self.name)
        self.engine: Supervisor | None = None
        """Set while its process may hold memory."""
        self.phase = ModelPhase.UNLOADED
        self.num_users = 0
        self._num_uses = 0
        """Number of requests since it was loaded."""
        self._waiters: dict[str, asyncio.Future[Supervisor]] = {}
        """Futures of requests that wait until it is loaded, in order."""
        self._user_left = asyncio.Event()
        self.last_used = 0.0
        self.loaded_at = 0.0
        self.load_seconds = 0.0
        self.weight_bytes = 0
        """Bytes on the device; 0 until known."""
        self.least_kv_bytes = 0
        """See `Examination`."""
        self.expiry: asyncio.TimerHandle | None = None
        self.expires_at: float | None = None
        """The time at which it is unloaded if unused, in seconds since 1970; None is never."""
        self._num_failures = 0
        self._failed_until = 0.0

    # ---- status ------------------------------------------------------------------------

    @property
    def status(self) -> EngineStatus:
        if self.engine is None:
            return self._status
        is_kept = not self.is_pinned and self.keep_alive_seconds < 0
        status = dataclasses.replace(
            self.engine.status, expires_at=self.expires_at, is_kept=is_kept
        )
        if status.model_facts == ModelFacts():  # it is loaded again
            status = dataclasses.replace(status, model_facts=self._status.model_facts)
        if self.phase is ModelPhase.CLOSING:
            return dataclasses.replace(status, state="unloading")
        return status

    @property
    def is_loaded(self) -> bool:
        return self.phase is ModelPhase.LOADED

    def end_phase(self) -> None:
        """End a load or an unload, however that went."""
        self.phase = ModelPhase.UNLOADED if self.engine is None else ModelPhase.LOADED

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    @property
    def is_idle(self) -> bool:
        return not self.num_users and not self._waiters

    @property
    def is_shared(self) -> bool:
        """Whether more than one request has used it since it was loaded."""
        return self._num_uses > 1

    @property
    def stay_seconds(self) -> float:
        """Seconds for which a shared model still stays: as long as its load took in all."""
        return max(0.0, self.loaded_at + self.load_seconds - time.monotonic())

    @property
    def keep_alive_seconds(self) -> float:
        """Time without a request after which it is unloaded; negative is never."""
        return self._keep_alive_seconds if self.wanted_seconds is None else self.wanted_seconds

    @property
    def is_wanted(self) -> bool:
        """Whether it is pinned, or requests wait for it."""
        return self.is_pinned or bool(self._waiters)

    def set_state(self, state: EngineState, stage: str = "", fraction: float = 0.0) -> None:
        """Set the status of a model without an engine."""
        progress = (stage, fraction) if stage else None
        self._status = dataclasses.replace(
            self._status, state=state, progress=progress, download=None, error=""
        )

    def set_waiting(self, stage: str = "") -> None:
        """Set the status of a model that waits to be loaded; stage: what for."""
        self.set_state("starting" if self.is_pinned else "waiting", stage or "waiting for its turn")

    # ---- loading -----------------------------------------------------------------------

    async def fetch(self) -> None:
        """Download the checkpoint, if it must be. Raises ModelLoadError and NotAvailable."""
        if self._hub_name is None:
            return
        self._status = dataclasses.replace(
            self._status,
            state="downloading",
            progress=("downloading", 0.0),
            retry_after_seconds=_DOWNLOAD_SECONDS,
        )
        try:
            model = await fetch(
                self._hub_name, self.settings.model, self.settings.memory, self._take_download
            )
        finally:
            self._on_progress("", 1.0)
        self._hub_name = None
        self.settings = msgspec.structs.replace(self.settings, model=model)
        self._status = dataclasses.replace(self._status, retry_after_seconds=1.0)
        self.set_state("starting")

    def _take_download(self, progress: Progress) -> None:
        self._status = dataclasses.replace(
            self._status, progress=("downloading", progress.fraction), download=progress
        )
        self._on_progress(str(progress), progress.fraction)

    async def start(self, limit_bytes: int, private: PrivateFolder) -> None:
        """Start its engine with `limit_bytes` of device memory (0: the settings').

        Raises VlmServerError; no engine is left then.
        """
        started_at = time.monotonic()
        settings = msgspec.structs.replace(
            self.settings, model=msgspec.structs.replace(self.settings.model, name=self.name)
        )
        self.engine = self._make_engine(settings, self._on_progress, private)
        if limit_bytes:
            self.engine.set_memory_limit(limit_bytes)
        await self.engine.start()
        try:
            await self.engine.wait_ready()
        except BaseException:
            await self.stop()
            raise
        self.loaded_at = self.last_used = time.monotonic()
        self.load_seconds = self.loaded_at - started_at
        self._num_uses = 0
        stats = self.engine.status.stats
        self.weight_bytes = max(self.weight_bytes, stats.memory.baseline_bytes if stats else 0)
        self._num_failures = 0

    async def stop(self) -> None:
        """End its engine, and keep the facts of its model."""
        if self.engine is None:
            return
        facts = self.status.model_facts
        await self.engine.stop()
        self.engine = self.wanted_seconds = None
        self.phase = ModelPhase.UNLOADED
        self._status = EngineStatus("unloaded", self.name, model_facts=facts)

    # ---- requests ----------------------------------------------------------------------

    def wait(self, request_id: str) -> asyncio.Future[Supervisor]:
        """A future engine, used by the request once the model is loaded, until `release`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[request_id] = waiter
        return waiter

    def use(self) -> Supervisor:
        """The engine, used by one more request until `release`."""
        assert self.engine is not None
        self.num_users += 1
        self._num_uses += 1
        self.last_used = time.monotonic()
        return self.engine

    def release(self) -> None:
        self.num_users -= 1
        self.last_used = time.monotonic()
        self._user_left.set()

    def remove_waiter(self, request_id: str) -> None:
        self._waiters.pop(request_id, None)

    def cancel(self, request_id: str) -> bool:
        """Cancel a waiting request; returns whether there was one."""
        message = "The request was cancelled by the server's operator."
        return self.refuse(request_id, RequestCancelled(message))

    def refuse(self, request_id: str, error: RequestError) -> bool:
        """Fail a waiting request with `error`; returns whether there was one."""
        waiter = self._waiters.pop(request_id, None)
        if waiter is None or waiter.done():
            return False
        waiter.set_exception(error)
        return True

    @contextmanager
    def load_deadline(self, request_id: str, seconds: float | None) -> Iterator[None]:
        """Fails, while open, a request whose load has not begun within `seconds`, if any."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, self._miss_deadline, request_id) if seconds else None
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    def _miss_deadline(self, request_id: str) -> None:
        """Refuse a waiting request, unless the load or a download is under way."""
        if self.phase is ModelPhase.CLOSING:
            stage = "waiting until it is unloaded"
        elif self.engine is None and self._status.state == "waiting":
            stage, _ = self._status.progress or ("waiting", 0.0)
        else:
            return
        message = (
            f"The model `{self.name}` could not be loaded before the deadline "
            f"(deadlines.queue_timeout_seconds): it was {stage}."
        )
        self.refuse(request_id, QueueTimeout(message, "model"))

    def admit_waiters(self) -> None:
        """Give the engine to all waiting requests."""
        for waiter in self._take_waiters():
            waiter.set_result(self.use())

    def refuse_waiters(self, error: RequestError) -> None:
        for waiter in self._take_waiters():
            waiter.set_exception(error)

    def _take_waiters(self) -> list[asyncio.Future[Supervisor]]:
        waiters = [waiter for waiter in self._waiters.values() if not waiter.done()]
        self._waiters.clear()
        return waiters

    async def wait_until_unused(self) -> None:
        while self.num_users:
            self._user_left.clear()
            await self._user_left.wait()

    # ---- failed loads ------------------------------------------------------------------

    def record_failure(self, error: VlmServerError) -> None:
        """Record a failed load: the next one is tried later, unless nothing was tried."""
        if not isinstance(error, ModelDoesNotFit):
            seconds = min(_FIRST_PAUSE_SECONDS * 2**self._num_failures, _LONGEST_PAUSE_SECONDS)
            self._num_failures += 1
            self._failed_until = time.monotonic() + seconds
        is_final = isinstance(error, ModelLoadError)
        self._status = dataclasses.replace(
            self._status,
            state="failed" if is_final else "unloaded",
            progress=None,
            download=None,
            error=str(error),
        )

    @property
    def pause_seconds(self) -> float:
        """Seconds until another load may be tried after a failed one."""
        return max(0.0, self._failed_until - time.monotonic())

    def unloadable(self) -> EngineUnavailable:
        """The error of a request that arrives while loading is paused after a failure."""
        return EngineUnavailable(
            f"The model `{self.name}` can't be loaded at present; the server's log says why.",
            "model",
            max(1.0, self.pause_seconds),
        )

    def forget_failure(self) -> None:
        """Allow another load without a pause, for an operator."""
        self._failed_until = 0.0
