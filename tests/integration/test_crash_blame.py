"""Real engines are killed in the midst of a step: only its own work is blamed, as far as known."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.integration.test_supervisor import (
    FAMILY,
    LONG,
    START_SECONDS,
    all_events,
    ask,
    ignore_progress,
    read_tokens,
    settings_for,
)
from tests.support.images import random_image
from tests.support.waiting import until
from tests.tiny_models.fixtures import TinyModel
from vlm_server.protocol import Event, Finished, OnDevice
from vlm_server.settings import CacheSettings, SchedulerSettings, Settings
from vlm_server.supervisor.engine_process.client import EngineRequest
from vlm_server.supervisor.shape import DeviceLoad
from vlm_server.supervisor.supervisor import Supervisor

pytestmark = pytest.mark.asyncio(loop_scope="module")

COSTLY = random_image(1, 400, 400)


class KillingSupervisor(Supervisor):
    """Kills its engine when that announces work of which `kills` is true."""

    kills: Callable[[OnDevice], bool] = staticmethod(lambda _: False)

    def _handle(self, event: Event) -> None:
        super()._handle(event)
        if isinstance(event, OnDevice) and self.kills(event):
            self.kill()

    def kill(self) -> None:
        assert self.status.pid is not None
        os.kill(self.status.pid, signal.SIGKILL)

    async def replaced(self, restarts: int) -> None:
        """Wait for the next engine."""
        await until(lambda: self.status.restarts > restarts, START_SECONDS)
        await until(lambda: self.status.is_ready, START_SECONDS)

    def blamed(self, request: EngineRequest) -> set[DeviceLoad]:
        """The loads of a request against which crashes count."""
        return {load for load in request.shape.loads if load in self._quarantine._records}

    def count(self, state: str) -> int:
        """Requests in a state, as the engine has said last."""
        return 0 if self.status.stats is None else self.status.stats.requests[state]


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[KillingSupervisor]:
    supervisor = KillingSupervisor(settings, ignore_progress)
    await supervisor.start()
    await asyncio.wait_for(supervisor.wait_ready(), START_SECONDS)
    yield supervisor
    await supervisor.stop()


async def test_prompt_beside_decoding_sequence_is_not_refused_by_third_crash(
    tiny_model: TinyModel,
):
    """The sequence may be to blame. A busy machine may kill the engine after the step."""
    costly, num_blamed = ask("costly", COSTLY), 0
    async with running(settings_for(tiny_model(FAMILY))) as supervisor:
        for restarts in range(6):
            supervisor.kills = lambda event: event.prefilling == ("costly",)
            decoding = supervisor.stream(ask("decoding", "Go on", sampling=LONG))
            await read_tokens(decoding, 2)
            await all_events(supervisor, costly)
            assert [event async for event in decoding]
            await supervisor.replaced(restarts)
            num_blamed += supervisor.blamed(costly) == {costly.shape.prefilling}
            if num_blamed == 3:
                break
        assert num_blamed == 3
        supervisor.kills = lambda _: False
        assert supervisor.status.quarantined_shapes == 0
        assert isinstance((await all_events(supervisor, costly))[-1], Finished)
        assert not supervisor.blamed(costly)


async def test_prompt_that_waits_is_not_blamed_for_crash_of_decoding(tiny_model: TinyModel):
    """Its image is encoded; there is no room for its sequence yet."""
    settings = settings_for(tiny_model(FAMILY))
    settings = replace(settings, scheduler=SchedulerSettings(max_num_seqs=1))
    async with running(settings) as supervisor:
        decoding = supervisor.stream(ask("decoding", "Go on", sampling=LONG))
        await read_tokens(decoding, 2)
        costly = ask("costly", COSTLY)
        waiting = asyncio.create_task(all_events(supervisor, costly))
        await until(lambda: supervisor.count("prefill") == 1)
        await read_tokens(decoding, 2)
        supervisor.kill()
        assert [event async for event in decoding]
        await waiting
        await supervisor.replaced(0)
        assert not supervisor.blamed(costly)


def replace_files(folder: Path, new: Callable[[Path], None]) -> None:
    """Replace each cache file by a `new` one of its name."""
    for path in list(folder.rglob("*.safetensors")):
        path.unlink()
        new(path)


async def test_disk_read_is_not_blamed_as_prefill(tiny_model: TinyModel, tmp_path: Path):
    settings = settings_for(tiny_model(FAMILY))
    cache = CacheSettings(max_disk_bytes=1 << 30, disk_folder=str(tmp_path))
    async with running(replace(settings, cache=cache)) as supervisor:
        request = ask("first", COSTLY)
        await all_events(supervisor, request)
    async with running(replace(settings, cache=cache)) as supervisor:
        replace_files(tmp_path, os.mkfifo)  # so that their reader waits
        reading = asyncio.create_task(all_events(supervisor, request))
        await until(lambda: supervisor.count("reading_disk") == 1)
        supervisor.kill()
        replace_files(tmp_path, Path.touch)
        await reading
        await supervisor.replaced(0)
        assert supervisor.blamed(request) == {request.shape.reading}
