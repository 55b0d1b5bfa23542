"""All served models within one limit on device memory: loading them, and making room.

Models are loaded one after the other, in the order of their first requests. If a model does not fit
next to the loaded ones, unpinned models are unloaded: idle ones first, then the least recently
used. A model in use finishes its requests; new requests for it wait until it is loaded again. See
docs/models.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from vlm_server.errors import (
    ConfigError,
    Conflict,
    EngineUnavailable,
    ModelLoadError,
    ModelNotFound,
    RequestError,
    VlmServerError,
)
from vlm_server.hub.examination import examine
from vlm_server.hub.find import find_by_name
from vlm_server.platform.private_folder import PrivateFolder
from vlm_server.settings import ListedModel, ModelSettings, Settings
from vlm_server.supervisor.engine_process.client import EngineStatus
from vlm_server.supervisor.models.load_turns import LoadTurns
from vlm_server.supervisor.models.memory_shares import ExamineCheckpoint, MemoryShares
from vlm_server.supervisor.models.served_model import MakeEngine, ModelPhase, ServedModel
from vlm_server.supervisor.supervisor import ProgressCallback, Supervisor

logger = logging.getLogger(__name__)


class ModelPool:
    """The `ModelClient` of the models in the settings. Use from one event loop.

    `on_progress(stage, fraction)` is called while models load, see `Supervisor`.
    """

    def __init__(
        self,
        settings: Settings,
        on_progress: ProgressCallback,
        make_engine: MakeEngine = Supervisor,
        examine: ExamineCheckpoint = examine,
    ) -> None:
        """`make_engine` and `examine` are for tests without engines and checkpoints.

        Raises ConfigError if two models have one name, or if an adapter's base is not served.
        """
        self._make_engine = make_engine
        self._settings = settings
        self._on_progress = on_progress
        self._private = PrivateFolder()
        self._models: dict[str, ServedModel] = {}
        self._turns = LoadTurns()
        self._shares = MemoryShares(settings.memory, self._models, examine)
        self._tasks = set[asyncio.Task[None]]()
        self._first_loads: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self._adapters = {name: each for name, each in settings.models.items() if each.base}
        if settings.model.path or len(self._adapters) == len(settings.models):
            self._add_model(ServedModel(settings, on_progress, make_engine))
        elif unused := _changed_settings(settings.model):
            logger.warning("without model.path these have no effect: %s", ", ".join(unused))
        for name, listed in settings.models.items():
            if name not in self._adapters:
                self._add_model(self._new_model(name, listed))
        for name, adapter in self._adapters.items():
            if adapter.base not in self._models:
                models = ", ".join(f"`{model}`" for model in self._models)
                raise ConfigError(f"`models.{name}.base`: {adapter.base!r} is none of {models}")

    # ---- what is served ------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        return (*self._models, *self._adapters)

    def aliases(self, name: str) -> tuple[str, ...]:
        adapter = self._adapters.get(name)
        return self._models[name].aliases if adapter is None else adapter.aliases

    def base(self, name: str) -> str | None:
        adapter = self._adapters.get(name)
        return None if adapter is None else adapter.base

    def is_pinned(self, name: str) -> bool:
        return self._model(name).is_pinned

    def status(self, name: str) -> EngineStatus:
        status, adapter = self._model(name).status, self._adapters.get(name)
        return status if adapter is None else status.of_adapter(name, adapter.adapter)

    def _model(self, name: str) -> ServedModel:
        """The model of this name, or the base of the adapter of this name."""
        return self._models[self.base(name) or name]

    @property
    def num_in_flight(self) -> int:
        return sum(model.num_users for model in self._models.values())

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a model to be loaded."""
        return sum(model.num_waiting for model in self._models.values())

    @property
    def is_starting(self) -> bool:
        """Whether a pinned model is loading for the first time, downloads not counted."""
        return any(model.status.state == "starting" for model in self._pinned())

    def add(self, name: str) -> str:
        if name in self.names:
            return name
        local_model = find_by_name(name, self._settings.model.search_folders)
        if local_model is None:
            raise ModelNotFound(f"There is no model `{name}` on this machine.", "model")
        if local_model.name not in self.names:
            self._add_model(
                self._new_model(local_model.name, ListedModel(path=str(local_model.folder)))
            )
        return local_model.name

    def _new_model(self, name: str, listed: ListedModel) -> ServedModel:
        model = listed.as_model(name, self._settings.model.search_folders)
        cache = msgspec.structs.replace(self._settings.cache, disk_folder=self._disk_path(name))
        settings = msgspec.structs.replace(self._settings, model=model, cache=cache)
        return ServedModel(settings, self._on_progress, self._make_engine)

    def _disk_path(self, name: str) -> str:
        """A listed model's own folder within `[model]`'s: each has `max_disk_bytes` to itself."""
        digest = hashlib.sha256(name.encode()).hexdigest()
        return str(Path(self._settings.cache.disk_folder) / f"model-{digest[:16]}")

    def _add_model(self, model: ServedModel) -> None:
        if model.name in self.names:
            raise ConfigError(f"two models are called `{model.name}`: give one another name")
        self._models[model.name] = model

    # ---- the daemon's life -----------------------------------------------------------

    async def start(self) -> None:
        """Begin to load the pinned models, in the background."""
        self._first_loads = [self._begin_load(model) for model in self._pinned()]

    async def wait_ready(self) -> None:
        """Wait until the pinned models are loaded.

        Raises ModelLoadError if one can't be loaded or downloaded, NotAvailable if a later download
        may succeed.
        """
        for load in self._first_loads:
            await asyncio.shield(load)

    async def stop(self) -> None:
        """Let running requests finish within `drain_timeout_seconds`, then end all engines."""
        self._is_stopping = True
        for model in self._models.values():
            self._set_expiry(model, None)
            model.refuse_waiters(EngineUnavailable("The server is stopping."))
        draining = [model.engine for model in self._models.values() if model.engine is not None]
        await asyncio.gather(*(engine.stop() for engine in draining))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(model.stop() for model in self._models.values()))
        self._private.close()

    def _pinned(self) -> list[ServedModel]:
        return [model for model in self._models.values() if model.is_pinned]

    # ---- requests ------------------------------------------------------------------

    def check_ready(self) -> None:
        states = [model.status.state for model in self._models.values() if model.is_pinned]
        if len(states) == len(self._models) and "ready" not in states:
            raise EngineUnavailable(f"The engine is not ready: {states[0]}.")

    @asynccontextmanager
    async def lease(
        self, name: str, request_id: str, keep_alive_seconds: float | None = None
    ) -> AsyncIterator[Supervisor]:
        model = self._model(name)
        engine = await self._engine(model, request_id)
        if keep_alive_seconds is not None:
            model.wanted_seconds = keep_alive_seconds
        try:
            yield engine
        finally:
            model.release()
            self._start_expiry(model)

    async def touch(
        self, name: str, request_id: str, keep_alive_seconds: float | None = None
    ) -> None:
        model = self._model(name)
        if keep_alive_seconds != 0:
            async with self.lease(name, request_id, keep_alive_seconds) as engine:
                if not engine.status.is_ready:
                    raise EngineUnavailable(f"The engine is not ready: {engine.status.state}.")
                return
        if model.engine is not None:
            model.wanted_seconds = 0.0
            self._start_expiry(model)

    async def _engine(self, model: ServedModel, request_id: str) -> Supervisor:
        """The engine of `model`, once that is loaded. The caller has to call `model.release`."""
        self._set_expiry(model, None)
        if model.is_loaded or (model.is_pinned and model.engine is not None):
            return model.use()
        if model.is_pinned:
            raise EngineUnavailable(f"The engine is not ready: {model.status.state}.")
        if self._is_stopping:
            raise EngineUnavailable("The server is stopping.")
        if model.pause_seconds:
            raise model.unloadable()
        waiter = model.wait(request_id)
        if model.phase is ModelPhase.UNLOADED:
            self._begin_load(model)
        try:
            return await waiter
        except asyncio.CancelledError:
            model.remove_waiter(request_id)
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                model.release()
                self._start_expiry(model)
            raise

    def cancel(self, request_id: str) -> bool:
        models = self._models.values()
        engines = [model.engine for model in models if model.engine is not None]
        return any(engine.cancel(request_id) for engine in engines) or any(
            model.cancel(request_id) for model in models
        )

    # ---- for operators -----------------------------------------------------------------

    async def load(self, name: str) -> None:
        model, request_id = self._model(name), f"load-{uuid.uuid4()}"
        model.forget_failure()
        with model.load_deadline(request_id, self._settings.deadlines.queue_timeout_seconds):
            async with self.lease(name, request_id):
                pass

    async def unload(self, name: str) -> None:
        model = self._model(name)
        if model.is_pinned:
            raise Conflict(f"The model `{model.name}` is pinned: it stays loaded.", "model")
        await asyncio.shield(self._spawn(self._unload_in_turn(model)))

    def clear_caches(self, name: str) -> None:
        engine = self._model(name).engine
        if engine is None:
            raise EngineUnavailable(f"The model `{name}` is not loaded.")
        engine.clear_caches()

    # ---- loading -------------------------------------------------------------------

    def _begin_load(self, model: ServedModel) -> asyncio.Task[None]:
        """Load a model that is not loaded, in the background."""
        model.phase = ModelPhase.LOADING
        model.set_waiting()
        return self._spawn(self._load(model))

    async def _load(self, model: ServedModel) -> None:
        """Load a model that requests are waiting for, then admit them. Raises what `start` does."""
        try:
            await model.fetch()
            async with self._turns.turn(model, to_load=True):
                limit_bytes = await self._place(model) if model.is_wanted else 0
                if not model.is_wanted:
                    self._shares.share_out()
                    model.set_state("unloaded")
                    return
                await model.start(limit_bytes, self._private)
                self._shares.share_out()
        except Exception as error:
            if not isinstance(error, VlmServerError):
                logger.exception("loading `%s` failed unexpectedly", model.name)
            self._fail(
                model, error if isinstance(error, VlmServerError) else ModelLoadError(str(error))
            )
            if model.is_pinned:
                raise
        finally:
            model.end_phase()
        model.admit_waiters()
        self._start_expiry(model)

    def _fail(self, model: ServedModel, error: VlmServerError) -> None:
        model.record_failure(error)
        if model.is_pinned:  # `wait_ready` raises the error
            return
        logger.error("the model `%s` can't be loaded: %s", model.name, error)
        model.refuse_waiters(error if isinstance(error, RequestError) else model.unloadable())

    async def _place(self, model: ServedModel) -> int:
        """Make room for a model; returns its limit, or 0 (the settings') if it is the only one."""
        if len(self._models) == 1:
            return 0
        model.set_state(model.status.state, "looking for room")
        await self._shares.check(model)
        while model.is_wanted and self._shares.is_short(model):
            victim = self._choose_victim()
            if not victim.is_idle:
                model.set_waiting(f"waiting until `{victim.name}` makes room")
            await self._unload_or_wait(victim)
        return await self._shares.shrink_others_for(model) if model.is_wanted else 0

    def _choose_victim(self) -> ServedModel:
        """The model to unload next; `MemoryShares.check` ensures that there is one."""
        candidates = [candidate for candidate in self._shares.loaded if not candidate.is_pinned]
        return min(candidates, key=lambda candidate: (not candidate.is_idle, candidate.last_used))

    async def _unload_or_wait(self, model: ServedModel) -> None:
        """Unload a model for another one. A model in use stays for as long as its load took:
        another may be idle by then."""
        if model.stay_seconds and not model.is_idle:
            await asyncio.sleep(model.stay_seconds)
        else:
            await self._unload(model)

    async def _unload_in_turn(self, model: ServedModel, expires_at: float | None = None) -> None:
        """Unload a model; for a timer, only if its time `expires_at` was not changed since."""
        async with self._turns.turn(model, to_load=False):
            if expires_at is None or (model.is_idle and model.expires_at == expires_at):
                await self._unload(model)

    async def _unload(self, model: ServedModel) -> None:
        """Unload a model once it is unused; new requests wait for the next load."""
        if not model.is_loaded:
            return
        model.phase = ModelPhase.CLOSING
        self._set_expiry(model, None)
        try:
            await model.wait_until_unused()
            await model.stop()
            logger.info("the model `%s` was unloaded", model.name)
        finally:
            model.end_phase()
        self._shares.share_out()
        if model.is_wanted and model.phase is ModelPhase.UNLOADED:
            self._begin_load(model)

    # ---- unused models -----------------------------------------------------------------

    def _start_expiry(self, model: ServedModel) -> None:
        """Start the timer that unloads an idle model.

        A model with several users stays for at least as long as its load took: else most of the
        time would go into loads.
        """
        if model.is_pinned or self._is_stopping or not (model.is_loaded and model.is_idle):
            return
        seconds = model.keep_alive_seconds
        if model.is_shared and seconds >= 0:
            seconds = max(seconds, model.stay_seconds)
        self._set_expiry(model, seconds if seconds >= 0 else None)

    def _set_expiry(self, model: ServedModel, seconds: float | None) -> None:
        if model.expiry is not None:
            model.expiry.cancel()
        model.expiry = model.expires_at = None
        if seconds is not None:
            model.expires_at = time.time() + seconds
            model.expiry = asyncio.get_running_loop().call_later(
                seconds, lambda at: self._spawn(self._unload_in_turn(model, at)), model.expires_at
            )

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._discard_task)
        return task

    def _discard_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # else asyncio logs it again


def _changed_settings(model: ModelSettings) -> list[str]:
    """The settings of `[model]` that were given, but for those that hold for all models."""
    fields = (field for field in msgspec.structs.fields(model) if field.name != "search_folders")
    return [
        f"model.{field.name}" for field in fields if getattr(model, field.name) != field.default
    ]
