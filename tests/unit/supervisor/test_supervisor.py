"""The supervisor around a fake process: messages sent, restarts, and the end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.waiting import until
from vlm_server.protocol import Event, Loading, ModelFacts, Ready, SetMemoryLimit, Start, Unloadable
from vlm_server.settings import EngineSettings, MemorySettings, Settings
from vlm_server.supervisor.engine_process.history import MAX_FAILED_STARTS, FailedStarts
from vlm_server.supervisor.supervisor import ProgressCallback, Supervisor

SETTINGS = Settings(
    engine=EngineSettings(openblas="off", min_restart_backoff_seconds=0.01),
    memory=MemorySettings(max_bytes=1000),
)
READY = Ready("demo", "cpu", 100, ModelFacts())


class FakeProcess:
    """Stands in for `EngineProcess`; `say` makes it send an event."""

    pid = 1
    end_seconds = 0.0

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.has_ended = False
        self._said = asyncio.Queue[Event | None]()

    def say(self, event: Event | None) -> None:
        """Send an event; None ends the process."""
        self._said.put_nowait(event)

    async def events(self) -> AsyncIterator[Event]:
        while (event := await self._said.get()) is not None:
            yield event

    def send(self, command: Any) -> None:
        self.sent.append(command)

    async def flush(self, _seconds: float) -> bool:
        return True

    async def wait(self, _seconds: float) -> bool:
        return False

    async def end(self) -> int:
        await asyncio.sleep(self.end_seconds)
        self.has_ended = True
        return 0


def ignore_progress(_stage: str, _fraction: float) -> None:
    """A progress callback for tests about something else."""


class FakeSupervisor(Supervisor):
    def __init__(self, on_progress: ProgressCallback) -> None:
        super().__init__(SETTINGS, on_progress)
        self.processes: list[FakeProcess] = []

    async def _start_process(self, environment: dict[str, str]) -> Any:
        self.processes.append(FakeProcess())
        return self.processes[-1]


async def start_supervisor(
    on_progress: ProgressCallback = ignore_progress,
) -> tuple[FakeSupervisor, FakeProcess]:
    supervisor = FakeSupervisor(on_progress)
    await supervisor.start()
    await until(lambda: any(one.sent for one in supervisor.processes))
    return supervisor, supervisor.processes[0]


async def test_memory_limit_changed_during_restart_is_sent_when_ready() -> None:
    supervisor, first = await start_supervisor()
    first.say(READY)
    await supervisor.wait_ready()
    first.say(None)
    await until(lambda: len(supervisor.processes) == 2 and bool(supervisor.processes[1].sent))
    second = supervisor.processes[1]
    (start,) = second.sent
    assert isinstance(start, Start)
    assert start.memory.max_bytes == 1000
    supervisor.set_memory_limit(500)
    second.say(READY)
    await until(lambda: supervisor.status.is_ready)
    assert second.sent[1:] == [SetMemoryLimit(500)]
    await supervisor.stop()


async def test_memory_limit_is_sent_once() -> None:
    supervisor, process = await start_supervisor()
    process.say(READY)
    await supervisor.wait_ready()
    assert len(process.sent) == 1
    supervisor.set_memory_limit(500)
    assert process.sent[1:] == [SetMemoryLimit(500)]
    await supervisor.stop()


async def test_cancelled_stop_followed_by_stop_ends_engine() -> None:
    supervisor, process = await start_supervisor()
    process.end_seconds = 0.2
    impatient = asyncio.create_task(supervisor.stop())
    await asyncio.sleep(0.05)
    impatient.cancel()
    await supervisor.stop()
    assert process.has_ended
    assert supervisor.status.state == "stopped"


@pytest.mark.parametrize("end", [READY, Unloadable("it is broken"), None])
async def test_load_progress_ends_with_load(end: Event | None) -> None:
    """Whether the engine gets ready, can't load the model any more, or dies before that."""
    stages = list[str]()
    supervisor, process = await start_supervisor(lambda stage, _fraction: stages.append(stage))
    for event in (READY, end):
        process.say(Loading("warming up", 0.5))
        process.say(event)
        if event is READY:
            await until(lambda: supervisor.status.is_ready)
            assert stages == ["starting", "warming up", ""]
            assert supervisor.status.progress is None
        process.say(None)
        await until(lambda: len(stages) > 3 and stages[-1] == "starting")
        assert stages[:3] == ["starting", "warming up", ""]
        del stages[: stages.index("starting", 1)]
        process = supervisor.processes[-1]
    await supervisor.stop()
    assert stages == ["starting", ""]


# ---- failed starts -------------------------------------------------------------------


def give_up(status: int | None, *, was_late: bool = False) -> str:
    """The reason that the last of so many gives."""
    starts = FailedStarts(6 << 30)
    for _ in range(MAX_FAILED_STARTS - 1):
        assert starts.record_end(status, was_late=was_late) is None
    reason = starts.record_end(status, was_late=was_late)
    assert reason is not None
    return reason


def test_sigkill_at_start_is_blamed_on_memory() -> None:
    assert "6.00 GiB" in give_up(-signal.SIGKILL)
    assert "memory" in give_up(-signal.SIGKILL)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (-signal.SIGSEGV, "SIGSEGV"),
        (127, "status 127"),
        (None, "not be started"),
        (-99, "signal 99"),
    ],
)
def test_start_failure_names_exit_status(status: int | None, words: str) -> None:
    assert words in give_up(status)


def test_start_timeout_is_not_blamed_on_memory() -> None:
    reason = give_up(-signal.SIGKILL, was_late=True)
    assert "engine.start_timeout_seconds" in reason
    assert "memory" not in reason


def test_engine_that_was_ready_once_is_retried_forever() -> None:
    starts = FailedStarts(6 << 30)
    starts.record_end(1, was_late=False)
    starts.record_ready()
    for _ in range(100):
        assert starts.record_end(-signal.SIGKILL, was_late=False) is None
