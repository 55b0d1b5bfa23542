"""Loading, waiting and unloading of models: the real pool around fake engines."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import until
from vlm_server.errors import (
    ConfigError,
    Conflict,
    EngineUnavailable,
    ModelDoesNotFit,
    ModelLoadError,
    ModelNotFound,
    QueueTimeout,
    RequestCancelled,
)
from vlm_server.hub.examination import Examination, ExaminationRequest
from vlm_server.models import EMBEDDED
from vlm_server.protocol import MemoryStats, ModelFacts, Stats
from vlm_server.settings import (
    CacheSettings,
    DeadlineSettings,
    ListedModel,
    MemorySettings,
    ModelSettings,
    Settings,
)
from vlm_server.supervisor.engine_process.client import EngineStatus
from vlm_server.supervisor.models.model_pool import ModelPool

GB = 10**9
LOAD_SECONDS = 0.02


class FakeMachine:
    """All fake engines, and the memory that they hold."""

    def __init__(self, limit_bytes: int, weights: dict[str, int]) -> None:
        self.limit_bytes = limit_bytes
        self.weights = weights
        self.engines: list[FakeEngine] = []
        self.loads = Counter[str]()
        self.broken: set[str] = set()
        self.load_seconds = LOAD_SECONDS
        self.num_examinations = 0
        self.least_kv: dict[str, int] = {}

    def make_engine(self, settings: Settings, *_: Any) -> Any:
        engine = FakeEngine(self, settings)
        self.engines.append(engine)
        return engine

    async def examine(self, request: ExaminationRequest) -> Examination:
        self.num_examinations += 1
        name = request.model.name
        if name in self.broken:
            return Examination(refusal="it is broken")
        return Examination(
            weight_bytes=self.weights[name],
            limit_bytes=self.limit_bytes,
            least_kv_bytes=self.least_kv.get(name, 0),
        )

    @property
    def held_bytes(self) -> int:
        return sum(engine.held_bytes for engine in self.engines)

    def check(self) -> None:
        assert self.held_bytes <= self.limit_bytes
        limits = [engine.limit_bytes for engine in self.engines if engine.is_alive]
        assert sum(limits) <= self.limit_bytes or len(limits) == 1

    def loaded(self) -> set[str]:
        return {engine.name for engine in self.engines if engine.is_alive}


class FakeEngine:
    """Stands in for `Supervisor`; fills its memory limit with evictable bytes."""

    def __init__(self, machine: FakeMachine, settings: Settings) -> None:
        self.machine = machine
        self.name = settings.model.name
        self.limit_bytes = settings.memory.known_limit_bytes
        self.is_alive = False
        self.held_bytes = 0
        self.in_use = 0
        self.gives_back_after = 0.0
        self.cleared = 0
        self.state = "stopped"
        self.facts = ModelFacts()
        self.tells = True
        self.disk_folder = settings.cache.disk_folder

    async def start(self) -> None:
        assert self.machine.held_bytes + self.machine.weights[self.name] <= self.machine.limit_bytes
        self.machine.loads[self.name] += 1
        self.is_alive, self.state = True, "starting"
        self.held_bytes = self.machine.weights[self.name]

    async def wait_ready(self) -> None:
        await asyncio.sleep(self.machine.load_seconds)
        if self.name in self.machine.broken:
            raise ModelLoadError("it is broken")
        self.state = "ready"

    async def stop(self) -> None:
        assert not self.in_use, "stopped while it was in use"
        await asyncio.sleep(0)
        self.is_alive, self.held_bytes, self.state = False, 0, "stopped"

    def set_memory_limit(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        if self.held_bytes > limit_bytes:
            loop = asyncio.get_running_loop()
            loop.call_later(self.gives_back_after, self._shrink)

    def _shrink(self) -> None:
        self.held_bytes = min(self.held_bytes, self.limit_bytes)

    def fill(self) -> None:
        self.held_bytes = max(self.held_bytes, self.limit_bytes)

    def clear_caches(self) -> None:
        self.cleared += 1

    def cancel(self, request_id: str) -> bool:
        return False

    @property
    def status(self) -> EngineStatus:
        memory = MemoryStats(self.held_bytes, 0, 0, self.limit_bytes, 0, 0, 0, {}, 0.0)
        stats = Stats({}, 0, {}, memory, 0) if self.tells else None
        return EngineStatus(self.state, self.name, stats=stats, model_facts=self.facts)


def pool_of(
    machine: FakeMachine,
    listed: dict[str, ListedModel] | None = None,
    queue_seconds: float = 600.0,
    **model: Any,
) -> ModelPool:
    tables = listed if listed is not None else {name: table() for name in machine.weights}
    settings = Settings(
        model=ModelSettings(**model),
        models=tables,
        memory=MemorySettings(min_model_room_bytes=GB),
        deadlines=DeadlineSettings(queue_timeout_seconds=queue_seconds),
    )
    return ModelPool(settings, lambda _stage, _fraction: None, machine.make_engine, machine.examine)


def table(**fields: Any) -> ListedModel:
    return ListedModel(path="/nowhere", **fields)


async def use(pool: ModelPool, name: str, seconds: float = 0.0, request_id: str = "") -> None:
    """Ask a model; its engine is in use meanwhile, and has caches afterwards."""
    async with pool.lease(name, request_id or f"{name}-{random.random()}") as leased:
        engine: Any = leased
        assert engine.is_alive
        assert engine.name == name
        engine.in_use += 1
        try:
            engine.fill()
            engine.machine.check()
            await asyncio.sleep(seconds)
            assert engine.is_alive
        finally:
            engine.in_use -= 1


async def test_concurrent_requests_load_their_model_once() -> None:
    machine = FakeMachine(100 * GB, {"a": GB, "b": GB})
    pool = pool_of(machine)
    await pool.start()
    assert machine.loads == {}
    await asyncio.gather(*(use(pool, "a") for _ in range(20)), *(use(pool, "b") for _ in range(5)))
    assert machine.loads == {"a": 1, "b": 1}
    assert {pool.status(name).state for name in pool.names} == {"ready"}
    await pool.stop()
    assert machine.loaded() == set()


async def test_pinned_model_is_loaded_at_start_and_stays() -> None:
    machine = FakeMachine(5 * GB, {"a": GB, "b": GB, "c": GB})
    pool = pool_of(machine, {"a": table(), "b": table(pinned=True), "c": table()})
    await pool.start()
    with pytest.raises(EngineUnavailable, match="not ready"):
        await use(pool, "b")
    await pool.wait_ready()
    assert machine.loads == {"b": 1}
    await use(pool, "a")
    await use(pool, "c")
    assert machine.loaded() == {"b", "c"}
    with pytest.raises(Conflict):
        await pool.unload("b")
    await pool.stop()


def adapter(base: str) -> ListedModel:
    return ListedModel(base=base, adapter="/adapters/red", aliases=("rot",))


async def test_adapter_is_answered_by_its_bases_engine() -> None:
    machine = FakeMachine(100 * GB, {"a": GB, "b": GB})
    pool = pool_of(machine, {"red": adapter("b"), "a": table(), "b": table()})
    assert pool.names == ("a", "b", "red"), "the default one is no adapter"
    assert pool.aliases("red") == ("rot",)
    assert (pool.base("red"), pool.base("b")) == ("b", None)
    async with pool.lease("red", "1") as leased, pool.lease("b", "2") as same:
        assert leased is same
    assert machine.loads == {"b": 1}
    status = pool.status("red")
    assert (status.state, status.model_name, status.base) == ("ready", "red", "b")
    assert status.stats is None, "its base's memory would count twice"
    await pool.unload("red")
    assert machine.loaded() == set()
    await pool.load("red")
    assert machine.loaded() == {"b"}
    await pool.stop()


@pytest.mark.parametrize("base", ["c", "default", "red"])
async def test_adapter_of_unknown_base_is_refused(base: str) -> None:
    machine = FakeMachine(100 * GB, {"a": GB})
    with pytest.raises(ConfigError, match=r"`models\.red\.base`: .* is none of `a`"):
        pool_of(machine, {"a": table(), "red": adapter(base)})


async def test_embedded_model_is_served_beside_its_adapters_alone() -> None:
    machine = FakeMachine(100 * GB, {"demo": GB})
    pool = pool_of(machine, {"red": adapter("demo")})
    assert pool.names == ("demo", "red")
    assert pool.is_pinned("red")


async def test_settings_of_model_that_is_not_served_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = FakeMachine(5 * GB, {"a": GB})
    pool_of(machine, search_folders=("/models",))
    assert caplog.text == ""
    pool_of(machine, dtype="float16", max_context_tokens=9)
    assert "no effect: model.dtype, model.max_context_tokens" in caplog.text


async def test_least_recently_used_idle_model_is_unloaded() -> None:
    machine = FakeMachine(6 * GB, {"a": GB, "b": GB, "c": GB, "d": GB})
    pool = pool_of(machine)
    for name in ("a", "b", "c"):
        await use(pool, name)
    await use(pool, "a")
    await use(pool, "d")
    assert machine.loaded() == {"a", "c", "d"}
    await pool.stop()


async def test_model_with_large_kv_minimum_gets_room_for_requests() -> None:
    """Without this room, its engine would end: not even a short request fits."""
    machine = FakeMachine(6 * GB, {"a": GB, "b": GB})
    machine.least_kv["b"] = 2 * GB
    pool = pool_of(machine)
    await use(pool, "a")
    await use(pool, "b")
    assert machine.loaded() == {"b"}
    await use(pool, "a")
    assert machine.loaded() == {"a"}
    await pool.stop()


async def test_busy_model_is_unloaded_only_after_idle_models() -> None:
    machine = FakeMachine(6 * GB, {"a": GB, "b": GB, "c": GB, "d": GB})
    pool = pool_of(machine)
    busy = asyncio.create_task(use(pool, "a", 0.3))
    for name in ("b", "c", "d"):
        await use(pool, name)
    assert machine.loaded() == {"a", "c", "d"}
    await busy
    await pool.stop()


async def test_model_to_unload_is_chosen_again_after_wait() -> None:
    machine = FakeMachine(4 * GB, {"a": GB, "b": GB, "c": GB})
    machine.load_seconds = 0.5
    pool = pool_of(machine)
    long = asyncio.create_task(use(pool, "a", 2.0))
    await until(lambda: pool.status("a").is_ready)
    machine.load_seconds = LOAD_SECONDS
    short = asyncio.create_task(use(pool, "b", 0.1))
    await until(lambda: pool.status("b").is_ready)
    await use(pool, "c")  # `a` was used longest ago, but `b` is idle by now
    assert machine.loaded() == {"a", "c"}
    await asyncio.gather(long, short)
    await pool.stop()


async def test_unloading_model_finishes_its_requests_and_later_ones_wait() -> None:
    machine = FakeMachine(3 * GB, {"a": GB, "b": GB})
    pool = pool_of(machine)
    ends = []

    async def ask(name: str, seconds: float) -> None:
        await use(pool, name, seconds)
        ends.append(name)

    first = asyncio.create_task(ask("a", 0.2))
    await asyncio.sleep(2 * LOAD_SECONDS)
    other = asyncio.create_task(ask("b", 0.05))
    await asyncio.sleep(2 * LOAD_SECONDS)
    assert pool.status("a").state == "unloading"
    late = asyncio.create_task(ask("a", 0.0))
    await asyncio.gather(first, other, late)
    assert ends == ["a", "b", "a"]
    assert machine.loads == {"a": 2, "b": 1}
    await pool.stop()


async def test_alternating_models_serve_requests_between_loads() -> None:
    machine = FakeMachine(3 * GB, {"a": GB, "b": GB})
    machine.load_seconds = 0.05
    pool = pool_of(machine)
    stop = asyncio.get_running_loop().time() + 1.5
    served = Counter[str]()

    async def agent(name: str) -> None:
        while asyncio.get_running_loop().time() < stop:
            await use(pool, name, 0.002)
            served[name] += 1

    await asyncio.gather(agent("a"), agent("a"), agent("b"), agent("b"))
    assert machine.loads.total() <= 1.5 / (2 * machine.load_seconds) + 2
    assert min(served["a"], served["b"]) > 20
    await pool.stop()


async def test_restarting_unsurveyed_model_counts_towards_memory(
    tmp_path: Path,
) -> None:
    """A single model is never examined, so its memory is only known from its engine."""
    machine = FakeMachine(20 * GB, {"demo": 8 * GB, "org/b": GB})
    settings = Settings(
        model=ModelSettings(path=str(EMBEDDED), name="demo", search_folders=(str(tmp_path),)),
        memory=MemorySettings(min_model_room_bytes=GB),
    )
    folder = tmp_path / "org" / "b"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"0")
    pool = ModelPool(settings, lambda _stage, _fraction: None, machine.make_engine, machine.examine)
    await pool.start()
    await pool.wait_ready()
    machine.engines[0].state, machine.engines[0].tells = "restarting", False
    assert pool.add("org/b") == "org/b"
    await use(pool, "org/b")
    assert machine.engines[0].limit_bytes >= 13 * GB
    await pool.stop()


async def test_loaded_models_shrink_before_another_model_loads() -> None:
    machine = FakeMachine(20 * GB, {"a": GB, "b": GB})
    pool = pool_of(machine)
    await use(pool, "a")
    (engine,) = machine.engines
    assert engine.held_bytes == 20 * GB
    engine.gives_back_after = 0.1
    await use(pool, "b")
    assert engine.limit_bytes == 10 * GB
    machine.check()
    await pool.unload("b")
    assert engine.limit_bytes == 20 * GB
    await pool.stop()


async def test_unresponsive_engine_still_counts_its_memory() -> None:
    machine = FakeMachine(20 * GB, {"a": GB, "b": GB})
    pool = pool_of(machine)
    await use(pool, "a")
    (engine,) = machine.engines
    engine.state, engine.gives_back_after = "unresponsive", 0.2
    await use(pool, "b")
    machine.check()
    await pool.stop()


async def test_model_facts_are_kept_during_reload() -> None:
    machine = FakeMachine(20 * GB, {"a": GB, "b": GB})
    pool = pool_of(machine)
    async with pool.lease("a", "1"):
        machine.engines[0].facts = ModelFacts(family="shapes")
    await pool.unload("a")
    machine.load_seconds = 0.2
    loading = asyncio.create_task(use(pool, "a"))
    await until(lambda: pool.status("a").state == "starting")
    assert pool.status("a").model_facts.family == "shapes"
    await loading
    await pool.stop()


async def test_oversized_model_is_refused_with_figures_without_unloading_others() -> None:
    machine = FakeMachine(6 * GB, {"a": 2 * GB, "b": GB, "c": 9 * GB, "d": 3 * GB})
    tables = {"a": table(pinned=True), "b": table(), "c": table(), "d": table()}
    pool = pool_of(machine, tables)
    await pool.start()
    await pool.wait_ready()
    await use(pool, "b")
    with pytest.raises(ModelDoesNotFit, match=r"`c` needs 9\.31 GiB .* limit is 5\.59 GiB"):
        await use(pool, "c")
    for _ in range(2):  # at once, and with the figures again
        with pytest.raises(ModelDoesNotFit):
            await use(pool, "c")
    assert pool.status("c").state == "unloaded"
    with pytest.raises(ModelDoesNotFit, match=r"`d` needs .* and a keep 2\.79 GiB of it"):
        await use(pool, "d")
    assert machine.loaded() == {"a", "b"}
    await pool.stop()


async def test_idle_model_is_unloaded_after_its_keep_alive() -> None:
    machine = FakeMachine(20 * GB, {"a": GB, "b": GB, "c": GB})
    tables = {
        "a": table(keep_alive_seconds=0.6),
        "b": table(keep_alive_seconds=None),
        "c": table(keep_alive_seconds=0),
    }
    pool = pool_of(machine, tables)
    for name in tables:
        await use(pool, name)
    await until(lambda: machine.loaded() == {"a", "b"})
    for _ in range(4):  # each use begins the time anew
        await asyncio.sleep(0.2)
        await use(pool, "a")
    assert machine.loads["a"] == 1
    await until(lambda: machine.loaded() == {"b"})
    assert pool.status("a").state == "unloaded"
    await pool.stop()


async def test_request_sets_models_keep_alive() -> None:
    machine = FakeMachine(20 * GB, {"a": GB, "b": GB})
    pool = pool_of(machine)
    async with pool.lease("a", "1", keep_alive_seconds=0.0):
        pass
    await until(lambda: machine.loaded() == set())
    await pool.touch("a", "2", -1.0)
    assert pool.status("a").expires_at is None
    assert pool.status("a").is_kept
    assert machine.loaded() == {"a"}
    await use(pool, "a")  # as clients that can't say it: it is as was said last
    assert pool.status("a").expires_at is None
    await pool.touch("a", "3", 0.0)
    await until(lambda: machine.loaded() == set())
    await use(pool, "a")
    assert pool.status("a").expires_at is not None  # as its table says again
    assert not pool.status("a").is_kept
    await pool.unload("a")
    await pool.touch("a", "4", 0.0)
    assert machine.loads["a"] == 3
    await pool.stop()


async def test_zero_keep_alive_keeps_shared_model_for_others() -> None:
    """A shared model stays as long as its load took; a sole user unloads it at once."""
    machine = FakeMachine(20 * GB, {"a": GB, "b": GB})
    pool = pool_of(machine)
    async with pool.lease("a", "alone", keep_alive_seconds=0.0):
        pool._models["a"].load_seconds = 60.0
    await until(lambda: machine.loaded() == set())
    for _ in range(2):
        await use(pool, "a")
    pool._models["a"].load_seconds = 60.0
    await pool.touch("a", "gone", 0.0)
    expires_at = pool.status("a").expires_at
    assert expires_at is not None
    assert expires_at > time.time() + 30
    await pool.unload("a")  # who operates the server need not wait
    assert machine.loaded() == set()
    await pool.stop()


async def test_queued_load_names_its_blocker_and_times_out() -> None:
    machine = FakeMachine(10 * GB, {"a": 6 * GB, "b": 6 * GB, "c": GB})
    machine.load_seconds = 0.6
    pool = pool_of(machine, queue_seconds=0.2)
    busy, done = asyncio.Event(), asyncio.Event()

    async def stream() -> None:
        async with pool.lease("a", "stream"):
            busy.set()
            await done.wait()

    streaming = asyncio.create_task(stream())
    await until(lambda: machine.loaded() == {"a"})
    with pytest.raises(QueueTimeout, match="it was waiting until `a` is loaded"):
        await pool.load("c")
    await busy.wait()
    with pytest.raises(QueueTimeout, match="it was waiting until `a` makes room"):
        await pool.load("b")
    done.set()
    await streaming
    await until(lambda: pool.status("b").state == "unloaded")
    assert machine.loads == {"a": 1}, "nobody waits for others any more"
    await pool.load("b")  # takes longer than its deadline, but has begun
    assert machine.loaded() == {"b"}
    await pool.stop()


async def test_unready_pinned_model_is_not_reported_as_loaded() -> None:
    machine = FakeMachine(20 * GB, {"a": GB})
    pool = pool_of(machine, {"a": table(pinned=True)})
    await pool.start()
    await pool.wait_ready()
    await pool.touch("a", "1")
    machine.engines[0].state = "restarting"
    with pytest.raises(EngineUnavailable, match="restarting"):
        await pool.touch("a", "2")
    machine.engines[0].state = "ready"
    await pool.touch("a", "3")
    await pool.stop()


async def test_zero_keep_alive_unloads_busy_model_when_idle() -> None:
    machine = FakeMachine(20 * GB, {"a": GB, "b": GB})
    pool = pool_of(machine)
    busy = asyncio.create_task(use(pool, "a", 0.1))
    await asyncio.sleep(2 * LOAD_SECONDS)
    await pool.touch("a", "1", 0.0)
    assert pool.status("a").expires_at is None  # not as long as it is used
    await busy
    await until(lambda: machine.loaded() == set())
    await pool.stop()


async def test_later_keep_alive_cancels_pending_unload() -> None:
    machine = FakeMachine(20 * GB, {"a": GB, "b": GB})
    pool = pool_of(machine)
    await use(pool, "a")
    machine.load_seconds = 0.2
    loading = asyncio.create_task(use(pool, "b"))
    await asyncio.sleep(0.05)
    await pool.touch("a", "1", 0.0)
    await asyncio.sleep(0.05)  # it waits for its turn to be unloaded
    await pool.touch("a", "2", -1.0)
    await loading
    await asyncio.sleep(0.05)
    assert machine.loaded() == {"a", "b"}
    await pool.stop()


async def test_explicit_unload_waits_for_requests_in_progress() -> None:
    machine = FakeMachine(20 * GB, {"a": GB, "b": GB})
    pool = pool_of(machine)
    busy = asyncio.create_task(use(pool, "a", 0.2))
    await asyncio.sleep(2 * LOAD_SECONDS)
    await pool.touch("a", "1", 0.0)
    unloading = asyncio.create_task(pool.unload("a"))
    await asyncio.sleep(0.05)
    assert machine.loaded() == {"a"}
    await busy
    await unloading
    assert machine.loaded() == set()
    await pool.stop()


async def test_cancelled_requests_during_load_are_forgotten() -> None:
    machine = FakeMachine(20 * GB, {"a": GB, "b": GB})
    machine.load_seconds = 0.1
    pool = pool_of(machine)
    waiting = [asyncio.create_task(use(pool, "a", request_id=f"r{i}")) for i in range(3)]
    await asyncio.sleep(0.03)
    waiting[0].cancel()
    assert pool.cancel("r1")
    assert not pool.cancel("r1")
    with pytest.raises(RequestCancelled):
        await waiting[1]
    await waiting[2]
    assert pool.num_in_flight == 0
    await pool.unload("a")
    await pool.stop()


async def test_cancelled_request_does_not_load_its_model() -> None:
    machine = FakeMachine(3 * GB, {"a": GB, "b": GB})
    pool = pool_of(machine)
    busy = asyncio.create_task(use(pool, "a", 0.2))
    await asyncio.sleep(2 * LOAD_SECONDS)
    gone = asyncio.create_task(use(pool, "b"))
    late = asyncio.create_task(use(pool, "a"))
    await asyncio.sleep(0.05)
    gone.cancel()
    await busy
    await late
    await asyncio.sleep(0.05)
    assert machine.loads["b"] <= 1
    await use(pool, "b")
    await pool.stop()


async def test_failed_load_fails_all_waiters_and_is_retried_later() -> None:
    machine = FakeMachine(20 * GB, {"a": GB, "b": GB})
    machine.broken.add("a")
    pool = pool_of(machine)
    outcomes = await asyncio.gather(*(use(pool, "a") for _ in range(3)), return_exceptions=True)
    assert all(isinstance(outcome, EngineUnavailable) for outcome in outcomes)
    assert (pool.status("a").state, pool.status("a").error) == ("failed", "it is broken")
    with pytest.raises(EngineUnavailable) as caught:
        await use(pool, "a")
    assert "broken" not in caught.value.message
    assert caught.value.retry_after_seconds is not None
    assert machine.num_examinations == 1
    machine.broken.clear()
    await pool.load("a")  # whoever asks for it expressly need not wait
    assert pool.status("a").is_ready
    await use(pool, "b")
    await pool.stop()


async def test_failed_pinned_model_ends_start() -> None:
    machine = FakeMachine(20 * GB, {"a": GB, "b": GB})
    machine.broken.add("b")
    pool = pool_of(machine, {"a": table(), "b": table(pinned=True)})
    await pool.start()
    with pytest.raises(ModelLoadError, match="it is broken"):
        await pool.wait_ready()
    assert machine.loaded() == set()
    await pool.stop()


async def test_single_model_has_all_memory_and_is_not_surveyed() -> None:
    machine = FakeMachine(20 * GB, {"demo": GB})
    pool = pool_of(machine, {})
    await pool.start()
    await pool.wait_ready()
    assert (pool.names, machine.num_examinations, machine.engines[0].limit_bytes) == (
        ("demo",),
        0,
        0,
    )
    await use(pool, "demo")
    with pytest.raises(ModelNotFound):
        pool.add("org/nowhere")
    for path in ("/etc", "~", "../x", "./x", "."):
        with pytest.raises(ModelNotFound):
            pool.add(path)
    await pool.stop()


async def test_relative_folder_is_not_added_as_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeMachine(20 * GB, {"demo": GB})
    pool = pool_of(machine, {})
    (tmp_path / "org" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for path in ("org", "org/here", "org/../org", "org/here/../.."):
        with pytest.raises(ModelNotFound):
            pool.add(path)
    assert pool.names == ("demo",)


def test_models_with_same_name_are_refused(tmp_path: Path) -> None:
    machine = FakeMachine(20 * GB, {})
    with pytest.raises(ConfigError, match="`demo`"):
        pool_of(machine, {"demo": table()}, path=str(tmp_path), name="demo")


@pytest.mark.parametrize("disk_folder", ["", "/there"])
async def test_models_have_separate_disk_cache_folders(disk_folder: str) -> None:
    """`cache.max_disk_bytes` are for each of them."""
    machine = FakeMachine(100 * GB, {"demo": GB, "a": GB, "../b": GB})
    settings = Settings(
        models={"a": table(), "../b": table()},
        model=ModelSettings(path=str(EMBEDDED), name="demo"),
        cache=CacheSettings(max_disk_bytes=GB, disk_folder=disk_folder),
        memory=MemorySettings(min_model_room_bytes=GB),
    )
    pool = ModelPool(settings, lambda _stage, _fraction: None, machine.make_engine, machine.examine)
    await pool.start()
    await pool.wait_ready()
    for name in pool.names:
        await use(pool, name)
    folders = [Path(engine.disk_folder) for engine in machine.engines]
    assert folders[0] == Path(disk_folder)
    assert len({*folders}) == 3
    assert all(folder.parent == Path(disk_folder) for folder in folders[1:])
    assert ".." not in str(folders)
    await pool.stop()


async def test_stop_fails_waiting_requests_and_unloads_everything() -> None:
    machine = FakeMachine(20 * GB, {"a": GB, "b": GB})
    machine.load_seconds = 5.0
    pool = pool_of(machine)
    waiting = asyncio.create_task(use(pool, "a"))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(pool.stop(), 2)
    with pytest.raises(EngineUnavailable):
        await waiting
    assert machine.loaded() == set()


async def test_clear_caches_reaches_loaded_models() -> None:
    machine = FakeMachine(20 * GB, {"a": GB, "b": GB})
    pool = pool_of(machine)
    with pytest.raises(EngineUnavailable):
        pool.clear_caches("a")
    await use(pool, "a")
    pool.clear_caches("a")
    assert machine.engines[0].cleared == 1
    await pool.stop()


@pytest.mark.parametrize("seed", range(6))
async def test_random_mix_of_clients_is_served_within_memory_limit(seed: int) -> None:
    """Random sizes, clients, pauses and cancellations lose no request and leave nothing."""
    draw = random.Random(seed)
    weights = {name: draw.randint(1, 4) * GB for name in "abcde"}
    machine = FakeMachine(draw.randint(6, 14) * GB, weights)
    machine.load_seconds = 0.005
    tables = {name: table(keep_alive_seconds=draw.choice([-1, 0, 0.02, 300])) for name in weights}
    pool = pool_of(machine, tables)
    outcomes = Counter[str]()

    async def client(number: int) -> None:
        for turn in range(12):
            name = draw.choice("abcde")
            task = asyncio.create_task(use(pool, name, draw.uniform(0, 0.01), f"{number}-{turn}"))
            if draw.random() < 0.2:
                await asyncio.sleep(draw.uniform(0, 0.02))
                task.cancel()
            try:
                await task
                outcomes["served"] += 1
            except asyncio.CancelledError:
                outcomes["left"] += 1
            machine.check()
            await asyncio.sleep(draw.uniform(0, 0.01))

    await asyncio.wait_for(asyncio.gather(*(client(number) for number in range(8))), 60)
    assert outcomes.total() == 96
    assert pool.num_in_flight == 0
    await pool.stop()
    assert machine.held_bytes == 0
