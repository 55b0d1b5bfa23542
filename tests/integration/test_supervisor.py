"""The real supervisor and its engine process: streams, aborts, deaths and ends.

The supervisor's own behaviour is tried with scripted engines (`scripted_worker`), and in the whole
run with real ones, for which the scripts are questions like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from tests.integration import harness
from tests.support.image_files import image_of, submitted
from tests.support.images import random_image
from tests.support.scripted_daemon import ScriptedSupervisor
from tests.support.scripted_worker import SLOW, UNLOADABLE
from tests.support.waiting import until
from tests.support.whole_run import few_of
from tests.tiny_models.fixtures import TinyModel
from vlm_server.errors import EngineUnavailable, ModelLoadError, RequestTooCostly
from vlm_server.protocol import (
    MESSAGE_HEADER,
    Accepted,
    Event,
    Failed,
    Finished,
    OnDevice,
    SamplingParams,
    Tokens,
    encode_submit,
)
from vlm_server.settings import EngineSettings, ModelSettings, Server, Settings
from vlm_server.supervisor.engine_process.client import EngineRequest, RequestEvent
from vlm_server.supervisor.engine_process.process import EngineProcess
from vlm_server.supervisor.shape import shape_of
from vlm_server.supervisor.supervisor import Supervisor

pytestmark = pytest.mark.asyncio(loop_scope="module")

START_SECONDS = 60
FAMILY = "qwen2_5_vl"
LONG = SamplingParams(max_tokens=4000, temperature=0.0)
ROOT = Path(__file__).parents[2]


def ignore_progress(_stage: str, _fraction: float) -> None:
    pass


def supervisor_for(settings: Settings) -> Supervisor:
    return Supervisor(settings, ignore_progress)


either = pytest.mark.parametrize(
    "engine", few_of((ScriptedSupervisor, Supervisor), (ScriptedSupervisor,))
)
"""Around scripted engines, or around real ones."""


def settings_for(folder: Path) -> Settings:
    return Settings(
        server=Server(drain_timeout_seconds=20),
        model=ModelSettings(path=str(folder)),
        engine=EngineSettings(openblas="off", min_restart_backoff_seconds=0.1),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def supervisor(tiny_model: TinyModel) -> AsyncIterator[Supervisor]:
    """One engine for most tests; tests that kill it wait for its restart."""
    supervisor = supervisor_for(settings_for(tiny_model(FAMILY)))
    await supervisor.start()
    await asyncio.wait_for(supervisor.wait_ready(), START_SECONDS)
    yield supervisor
    await supervisor.stop()


def ask(*arguments: Any, **fields: Any) -> EngineRequest:
    submit = harness.ask(*arguments, **fields)
    return EngineRequest(encode_submit(submit), shape_of(submit))


async def all_events(supervisor: Supervisor, request: EngineRequest) -> list[RequestEvent]:
    return [event async for event in supervisor.stream(request)]


def text_of(events: list[RequestEvent]) -> str:
    return "".join(d.text for e in events if isinstance(e, Tokens) for d in e.deltas)


def is_running(pid: int) -> bool:
    """Whether a process runs; one that ended and was not reaped does not."""
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(done.stdout.strip()) and not done.stdout.strip().startswith("Z")


async def read_tokens(stream: AsyncIterator[RequestEvent], tokens: int) -> None:
    """Read until so many tokens have come."""
    while tokens > 0:
        event = await anext(stream)
        assert not isinstance(event, Finished | Failed), event
        tokens -= isinstance(event, Tokens)


async def test_request_is_accepted_streamed_and_finished(supervisor: Supervisor):
    events = await all_events(supervisor, ask("a", random_image(1), "What is this?"))
    assert isinstance(events[0], Accepted)
    first = next(number for number, event in enumerate(events) if isinstance(event, Tokens))
    assert isinstance(events[first - 1], OnDevice), "the device begins with it"
    events = [event for event in events if not isinstance(event, OnDevice)]
    assert all(isinstance(event, Tokens) for event in events[1:-1])
    assert isinstance(events[-1], Finished)
    assert isinstance(events[-2], Tokens)
    assert events[-2].deltas[-1].finish_reason == "length"
    assert events[-1].usage.completion_tokens == len(events) - 2 == 10
    assert text_of(events)


async def test_concurrent_streams_answer_as_alone(supervisor: Supervisor):
    submits = [ask(f"r{n}", random_image(n), f"Question {n}?") for n in range(5)]
    apart = [text_of(await all_events(supervisor, submit)) for submit in submits]
    together = await asyncio.gather(*(all_events(supervisor, submit) for submit in submits))
    assert [text_of(events) for events in together] == apart
    assert len(set(apart)) == 5


async def test_unreadable_image_fails_only_its_stream(supervisor: Supervisor):
    whole = submitted(random_image(1))
    cut = image_of(whole.data[:200], whole.format, whole.width, whole.height)
    broken = ask("bad", cut, "what?")
    good, failed = await asyncio.gather(
        all_events(supervisor, ask("good", "Hello")), all_events(supervisor, broken)
    )
    assert isinstance(failed[-1], Failed)
    assert failed[-1].code == "invalid_image"
    assert isinstance(good[-1], Finished)


async def test_closed_stream_aborts_its_request(supervisor: Supervisor):
    streams = [
        supervisor.stream(ask(f"gone {n}", random_image(n), sampling=LONG)) for n in range(3)
    ]
    for stream in streams:
        await read_tokens(stream, 2)
    await streams[0].aclose()
    other = await all_events(supervisor, ask("other", "Hello"))
    assert isinstance(other[-1], Finished)
    for stream in streams[1:]:
        await stream.aclose()
    await until(lambda: supervisor.status.stats is not None)
    await until(lambda: supervisor.status.stats.tracked == 0)  # type: ignore[union-attr]
    assert supervisor.num_in_flight == 0


async def test_stream_closed_before_first_event_aborts_its_request(supervisor: Supervisor):
    tasks = [
        asyncio.create_task(all_events(supervisor, ask(f"t{n}", random_image(n), sampling=LONG)))
        for n in range(6)
    ]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    answer = await all_events(supervisor, ask("next", "Hello"))
    assert isinstance(answer[-1], Finished)
    await until(lambda: supervisor.status.stats.tracked == 0)  # type: ignore[union-attr]
    assert supervisor.num_in_flight == 0


async def test_engine_memory_returns_to_baseline_after_burst(supervisor: Supervisor):
    async def burst(name: str) -> int:
        submits = [ask(f"{name} {n}", random_image(n, 200, 150), "what?") for n in range(8)]
        await asyncio.gather(*(all_events(supervisor, submit) for submit in submits))
        await until(lambda: supervisor.status.stats.tracked == 0)  # type: ignore[union-attr]
        await asyncio.sleep(0.1)
        assert supervisor.status.stats is not None
        return supervisor.status.stats.memory.active_bytes

    baseline = await burst("first")
    assert await burst("second") <= baseline * 1.01


async def test_killed_engine_fails_its_streams_and_restarts(supervisor: Supervisor):
    expected = text_of(await all_events(supervisor, ask("before", "Hello")))
    pid, restarts = supervisor.status.pid, supervisor.status.restarts
    assert pid is not None
    streams = [supervisor.stream(ask(f"cut {n}", "Hello", sampling=LONG)) for n in range(2)]
    for stream in streams:
        await read_tokens(stream, 3)
    os.kill(pid, signal.SIGKILL)
    for number, stream in enumerate(streams):
        rest = [event async for event in stream]
        assert [e for e in rest if isinstance(e, Finished | Failed)] == [rest[-1]]
        assert isinstance(rest[-1], Failed)
        assert (rest[-1].code, rest[-1].request_id) == ("engine_died", f"cut {number}")
    assert not supervisor.status.is_ready
    with pytest.raises(EngineUnavailable):
        await all_events(supervisor, ask("too soon", "Hello"))
    await until(lambda: supervisor.status.is_ready, START_SECONDS)
    assert supervisor.status.restarts == restarts + 1
    assert supervisor.status.pid != pid
    assert text_of(await all_events(supervisor, ask("after", "Hello"))) == expected
    assert supervisor.num_in_flight == 0


@either
async def test_engine_sending_invalid_messages_is_replaced(
    tiny_model: TinyModel, engine: type[Supervisor]
):
    supervisor, _ = await start_supervisor(tiny_model, engine)
    assert supervisor._process is not None
    supervisor._process._reader.feed_data(MESSAGE_HEADER.pack(1) + b"\xc1")
    await until(lambda: not supervisor.status.is_ready)
    assert supervisor.status.stats is None
    await until(lambda: supervisor.status.is_ready, START_SECONDS)
    assert supervisor.status.restarts == 1
    assert isinstance((await all_events(supervisor, ask("after", "Hello")))[-1], Finished)
    await supervisor.stop()


async def test_engine_with_consecutive_failed_steps_is_replaced(supervisor: Supervisor):
    """The API never lets such a number through: MLX raises when the first token is scored."""
    restarts = supervisor.status.restarts
    hostile = SamplingParams(max_tokens=4, logprobs=-(10**9))

    async def fail(name: str) -> None:
        events = await all_events(supervisor, ask(name, "Hello", sampling=hostile))
        assert isinstance(events[-1], Failed)
        assert events[-1].code in ("internal_error", "engine_died")

    running = supervisor.stream(ask("running", "Hello", sampling=LONG))
    await read_tokens(running, 3)
    for number in range(4):
        await fail(f"beside another {number}")
    await read_tokens(running, 3)
    assert supervisor.status.restarts == restarts
    await running.aclose()
    for number in range(3):
        await fail(f"alone {number}")
    await until(lambda: supervisor.status.restarts == restarts + 1)
    await until(lambda: supervisor.status.is_ready, START_SECONDS)
    assert isinstance((await all_events(supervisor, ask("after", "Hello")))[-1], Finished)
    assert supervisor.num_in_flight == 0


async def start_supervisor(
    tiny_model: TinyModel, kind: type[Supervisor] = Supervisor, **engine: float
) -> tuple[Supervisor, int]:
    """A ready supervisor that its test stops, and its engine's process id."""
    settings = settings_for(tiny_model(FAMILY))
    settings = replace(settings, engine=replace(settings.engine, **engine))
    supervisor = kind(settings, ignore_progress)
    await supervisor.start()
    await asyncio.wait_for(supervisor.wait_ready(), START_SECONDS)
    assert supervisor.status.pid is not None
    return supervisor, supervisor.status.pid


async def test_stop_lets_requests_finish_and_leaves_no_process(tiny_model: TinyModel):
    supervisor, pid = await start_supervisor(tiny_model)
    sampling = SamplingParams(max_tokens=60, temperature=0.0)
    running = supervisor.stream(ask("running", random_image(1), "what?", sampling=sampling))
    await read_tokens(running, 2)
    rest = asyncio.create_task(_rest(running))
    await supervisor.stop()
    events = await rest
    assert isinstance(events[-1], Finished)
    assert events[-1].usage.completion_tokens == 60
    assert supervisor.status.state == "stopped"
    assert not is_running(pid)
    with pytest.raises(EngineUnavailable):
        await all_events(supervisor, ask("late", "Hello"))


async def _rest(stream: AsyncIterator[RequestEvent]) -> list[RequestEvent]:
    return [event async for event in stream]


@pytest.mark.whole  # it waits for seconds, as it should
async def test_stop_ends_unresponsive_engine(tiny_model: TinyModel):
    """An aborted request's upload fills the pipe to the engine."""
    supervisor, pid = await start_supervisor(tiny_model)
    os.kill(pid, signal.SIGSTOP)
    upload = image_of(os.urandom(8 << 20), "PNG", 100, 100)
    asked = asyncio.create_task(all_events(supervisor, ask("large", upload, "what?")))
    await asyncio.sleep(0.5)
    asked.cancel()
    await asyncio.wait_for(supervisor.stop(), 20)
    assert supervisor.status.state == "stopped"
    assert not is_running(pid)


@either
async def test_stop_during_load_leaves_no_process(tiny_model: TinyModel, engine: type[Supervisor]):
    settings = settings_for(tiny_model(FAMILY))
    supervisor = engine(
        replace(settings, model=replace(settings.model, name=SLOW)), ignore_progress
    )
    await supervisor.start()
    await until(lambda: supervisor.status.pid is not None)
    pid = supervisor.status.pid
    assert pid is not None
    if engine is Supervisor:
        os.kill(pid, signal.SIGSTOP)  # it loads for as long as anyone waits
    await asyncio.wait_for(supervisor.stop(), 10)
    assert supervisor.status.state == "stopped"
    assert not is_running(pid)


@either
async def test_unservable_checkpoint_is_not_retried(tmp_path: Path, engine: type[Supervisor]):
    (tmp_path / UNLOADABLE).write_text("config.json is missing")  # as real engines find
    supervisor = engine(settings_for(tmp_path), ignore_progress)
    await supervisor.start()
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        await asyncio.wait_for(supervisor.wait_ready(), START_SECONDS)
    assert supervisor.status.state == "failed"
    assert supervisor.status.restarts == 0
    await until(lambda: supervisor.status.pid is None)
    await supervisor.stop()


@pytest.mark.parametrize(
    ("engine", "damage"),
    few_of(
        (
            (ScriptedSupervisor, UNLOADABLE),
            (Supervisor, "config.json"),
            (Supervisor, "generation_config.json"),
        ),
        ((ScriptedSupervisor, UNLOADABLE),),
    ),
)
async def test_model_loaded_before_is_retried_until_it_loads(
    tiny_model: TinyModel, tmp_path: Path, engine: type[Supervisor], damage: str
):
    """The cause of a failed restart may be temporary: a missing disk, or used memory."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(FAMILY), folder)
    (folder / UNLOADABLE).write_text("")
    supervisor = engine(settings_for(folder), ignore_progress)
    await supervisor.start()
    await asyncio.wait_for(supervisor.wait_ready(), START_SECONDS)
    whole = (folder / damage).read_text()
    (folder / damage).write_text('{"model_type": 7, "top_p": "x"}')
    assert supervisor.status.pid is not None
    os.kill(supervisor.status.pid, signal.SIGKILL)
    await until(lambda: supervisor.status.restarts >= 2, START_SECONDS)
    assert supervisor.status.state == "restarting"
    (folder / damage).write_text(whole)
    await until(lambda: supervisor.status.is_ready, START_SECONDS)
    assert isinstance((await all_events(supervisor, ask("after", "Hello")))[-1], Finished)
    await supervisor.stop()


@pytest.mark.parametrize(
    ("engine", "silence_seconds"),
    few_of(((ScriptedSupervisor, 0.6), (Supervisor, 2.0)), ((ScriptedSupervisor, 0.6),)),
)
async def test_hanging_engine_is_replaced(
    tiny_model: TinyModel, engine: type[Supervisor], silence_seconds: float
):
    supervisor, pid = await start_supervisor(
        tiny_model, engine, silence_timeout_seconds=silence_seconds
    )
    patient = supervisor.stream(ask("long", "Hello", sampling=LONG))
    await read_tokens(patient, 3)
    await asyncio.sleep(1.5 * silence_seconds)
    assert supervisor.status.pid == pid, "an engine that works was taken for one that hangs"
    os.kill(pid, signal.SIGSTOP)
    events = await asyncio.wait_for(_rest(patient), 20)
    assert isinstance(events[-1], Failed)
    assert events[-1].code == "engine_died"
    await until(lambda: supervisor.status.is_ready, START_SECONDS)
    assert not is_running(pid)
    assert isinstance((await all_events(supervisor, ask("after", "Hello")))[-1], Finished)
    await supervisor.stop()


@either
async def test_restart_backoff_does_not_grow_after_readiness(
    tiny_model: TinyModel, engine: type[Supervisor]
):
    supervisor, _ = await start_supervisor(tiny_model, engine)
    told: set[float] = set()

    def is_back() -> bool:
        if not supervisor.status.is_ready:
            told.add(supervisor.status.retry_after_seconds)
        return supervisor.status.is_ready

    for _ in range(6):  # pauses that double from 0.1 s would be over 1 s by then
        pid = supervisor.status.pid
        assert pid is not None
        told.clear()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not supervisor.status.is_ready)
        await until(is_back, START_SECONDS)
        assert max(told) - min(told) < 0.5, "the pause is told on top of what a start takes"
    await supervisor.stop()


@either
async def test_retry_after_during_restart_is_last_start_time(
    tiny_model: TinyModel, engine: type[Supervisor]
):
    """A client that comes again too soon gives up before the engine is back."""
    tiny_model(FAMILY)
    began = time.monotonic()
    supervisor, pid = await start_supervisor(tiny_model, engine)
    took = time.monotonic() - began
    os.kill(pid, signal.SIGKILL)
    await until(lambda: not supervisor.status.is_ready)
    assert took / 2 < supervisor.status.retry_after_seconds < took + 1
    await supervisor.stop()


@pytest.mark.whole
async def test_load_error_message_reaches_wait_ready(tiny_model: TinyModel, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(FAMILY), folder)
    (folder / "generation_config.json").write_text('{"top_p": "x"}')
    supervisor = supervisor_for(settings_for(folder))
    await supervisor.start()
    with pytest.raises(ModelLoadError, match="could not convert string to float"):
        await asyncio.wait_for(supervisor.wait_ready(), START_SECONDS)
    await supervisor.stop()


# ---- requests that kill engines ------------------------------------------------------

ENCODE, ENCODE_ON = "accept encode hang", "accept encode-on"
COSTLY = random_image(1, 1200, 1200)
"""Some seconds to encode: time to be killed in."""


class KillingSupervisor(Supervisor):
    """Kills its engine as soon as that reports work on a request `costly...`."""

    is_scripted = False

    async def _start_process(self, environment: dict[str, str]) -> EngineProcess:
        module = "tests.support.scripted_worker" if self.is_scripted else "vlm_server.engine"
        return await EngineProcess.start(module, environment)

    def _handle(self, event: Event) -> None:
        super()._handle(event)
        if isinstance(event, OnDevice) and any(i.startswith("costly") for i in event.request_ids):
            assert self.status.pid is not None
            os.kill(self.status.pid, signal.SIGKILL)


class ScriptedKillingSupervisor(KillingSupervisor):
    is_scripted = True


@pytest_asyncio.fixture(
    params=few_of((ScriptedKillingSupervisor, KillingSupervisor), (ScriptedKillingSupervisor,)),
    loop_scope="module",
)
async def killing_supervisor(
    request: pytest.FixtureRequest, tiny_model: TinyModel
) -> AsyncIterator[KillingSupervisor]:
    supervisor, _ = await start_supervisor(tiny_model, request.param)
    yield supervisor
    await supervisor.stop()


async def kill_engine_with(supervisor: Supervisor, request: EngineRequest) -> None:
    """Send a request that kills the engine, and wait for the restart."""
    events = await all_events(supervisor, request)
    assert not [event for event in events if isinstance(event, Tokens)]
    assert isinstance(events[-1], Failed)
    assert events[-1].code == "engine_died"
    await until(lambda: supervisor.status.is_ready, START_SECONDS)
    assert supervisor._quarantine.num_tracked == 0


def num_crashes(supervisor: Supervisor, request: EngineRequest) -> int:
    """The crashes that count against the load of a request."""
    records = map(supervisor._quarantine._records.get, request.shape.loads)
    return max((record.num_crashes for record in records if record), default=0)


async def test_request_that_kills_three_engines_is_refused(killing_supervisor: KillingSupervisor):
    for number in range(2):
        running = killing_supervisor.stream(ask("running", random_image(2), sampling=LONG))
        await read_tokens(running, 2)
        waiting = asyncio.create_task(
            all_events(killing_supervisor, ask("waiting", random_image(2, 90, 90)))
        )
        text = asyncio.create_task(all_events(killing_supervisor, ask("text", "Hello")))
        await kill_engine_with(killing_supervisor, ask(f"costly {number}", COSTLY, ENCODE))
        await asyncio.gather(waiting, text)
        assert isinstance((await _rest(running))[-1], Failed)
    assert killing_supervisor.status.quarantined_shapes == 0
    await kill_engine_with(killing_supervisor, ask("costly 2", COSTLY, ENCODE))
    restarts = killing_supervisor.status.restarts
    with pytest.raises(RequestTooCostly, match="1024 x 1024 pixels") as caught:
        await all_events(
            killing_supervisor, ask("costly 3", random_image(2, 1201, 1199), "And this?")
        )
    assert caught.value.retry_after_seconds == pytest.approx(600, abs=START_SECONDS)
    for innocent in (
        ask("text", "Hello"),
        ask("running", random_image(2)),
        ask("waiting", random_image(2, 90, 90)),
        ask("another size", random_image(2, 300, 300)),
    ):
        assert isinstance((await all_events(killing_supervisor, innocent))[-1], Finished)
    assert killing_supervisor.status.restarts == restarts == 3
    assert (
        killing_supervisor.status.quarantined_shapes,
        killing_supervisor.status.quarantine_refusals,
    ) == (1, 1)
    assert killing_supervisor.num_in_flight == killing_supervisor._quarantine.num_tracked == 0


async def test_externally_killed_engines_refuse_no_image(killing_supervisor: KillingSupervisor):
    for number in range(2):
        await kill_engine_with(killing_supervisor, ask(f"costly {number}", COSTLY, ENCODE))
    suspect = ask("harmless", COSTLY)
    assert num_crashes(killing_supervisor, suspect) == 2
    beside = asyncio.create_task(all_events(killing_supervisor, ask("beside", "Hello")))
    assert isinstance((await all_events(killing_supervisor, suspect))[-1], Finished)
    assert isinstance((await beside)[-1], Finished)
    assert num_crashes(killing_supervisor, suspect) == 0


async def test_abandoned_image_under_encode_is_blamed_for_crashes(
    killing_supervisor: KillingSupervisor,
):
    for number in range(2):
        left = asyncio.create_task(
            all_events(killing_supervisor, ask(f"left {number}", COSTLY, ENCODE_ON))
        )
        await until(lambda: bool(killing_supervisor._quarantine._working))
        left.cancel()
        await until(lambda: not killing_supervisor._quarantine.num_tracked)
        assert killing_supervisor.status.pid is not None
        os.kill(killing_supervisor.status.pid, signal.SIGKILL)
        await until(lambda: not killing_supervisor.status.is_ready)
        await until(lambda: killing_supervisor.status.is_ready, START_SECONDS)
    assert num_crashes(killing_supervisor, ask("next", COSTLY)) == 2


FRONT = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.integration.test_supervisor import LONG, ask, settings_for, supervisor_for
from vlm_server.protocol import MESSAGE_HEADER

async def front(moment):
    supervisor = supervisor_for(settings_for(Path(sys.argv[1])))
    await supervisor.start()
    while supervisor.status.pid is None:
        await asyncio.sleep(0.01)
    Path(sys.argv[3]).write_text(str(supervisor.status.pid))
    if moment != "loading":
        await supervisor.wait_ready()
    if moment == "streaming":
        stream = supervisor.stream(ask("a", "Hello", sampling=LONG))
        for _ in range(4):
            await anext(stream)
    if moment == "in the middle of a message":
        await asyncio.sleep(0.3)
        supervisor._process._writer.write(MESSAGE_HEADER.pack(1000) + b"the first bytes")
        await supervisor._process._writer.drain()
        await asyncio.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(front(sys.argv[2]))
"""

MOMENTS = ("streaming", "loading", "idle", "in the middle of a message")


@pytest.mark.parametrize(
    "moments", [MOMENTS[:1], pytest.param(MOMENTS[1:], marks=pytest.mark.whole)], ids=str
)
async def test_killed_front_leaves_no_engine_process(
    tiny_model: TinyModel, tmp_path: Path, moments: tuple[str, ...]
):
    model = str(tiny_model(FAMILY))
    fronts = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", FRONT, model, moment, str(tmp_path / moment)),
            cwd=ROOT,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        for moment in moments
    ]
    for front in fronts:
        assert await asyncio.wait_for(front.wait(), START_SECONDS) == -signal.SIGKILL
    engines = {moment: int((tmp_path / moment).read_text()) for moment in moments}
    with contextlib.suppress(AssertionError):
        await until(lambda: not any(map(is_running, engines.values())), 10)
    orphans = {moment: pid for moment, pid in engines.items() if is_running(pid)}
    for pid in orphans.values():
        os.kill(pid, signal.SIGKILL)
    assert not orphans


async def test_front_releases_image_bytes_during_answer(supervisor: Supervisor):
    request = ask("large", random_image(1), "what?", sampling=LONG)
    data = request.submit.images
    stream = supervisor.stream(request)
    del request
    await read_tokens(stream, 3)
    assert sys.getrefcount(data) == 2, "somebody beside this test and getrefcount holds it"
    await stream.aclose()
