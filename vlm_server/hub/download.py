"""Downloads, each in a process of its own, which is killed when the waiting task is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec

from vlm_server.errors import ModelLoadError, NotAvailable
from vlm_server.hub.examination import check_plan
from vlm_server.hub.find import hub_cache
from vlm_server.hub.messages import GO, Done, DownloadPlan, DownloadRefused, Message, Progress
from vlm_server.hub.names import HubName
from vlm_server.platform.child import launch
from vlm_server.settings import MemorySettings, ModelSettings

logger = logging.getLogger(__name__)

_DECODER = msgspec.json.Decoder(Message)
_MODULE = "vlm_server.hub.download_process"
_FEW_TRIES, _MANY_TRIES = 3, 10
"""Tries in a row without a new byte before a download fails: if the hub never answered, and if it
did. With the pauses, which double up to the longest, the latter take some minutes."""
_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 60.0

OnProgress = Callable[[Progress], None]
Approve = Callable[[DownloadPlan], Awaitable[None]]


async def download(name: HubName, on_progress: OnProgress, approve: Approve) -> Path:
    """The folder of `name`, once all files that the loader reads are in the hub's cache.

    `approve` gets the download plan, and raises to forbid it. Raises ModelLoadError if the
    repository can't be downloaded, NotAvailable if it can perhaps later. Cancelling kills the
    process; downloaded bytes are kept.
    """
    max_bytes, tries, max_tries = 0, 0, _FEW_TRIES
    while True:
        async with contextlib.aclosing(_messages(name)) as messages:
            async for message in messages:
                match message:
                    case DownloadPlan():
                        max_tries = _MANY_TRIES
                        await approve(message)
                    case Progress(done_bytes=done):
                        tries = 0 if done > max_bytes else tries
                        max_bytes = max(max_bytes, done)
                        on_progress(message)
                    case Done(folder):
                        return Path(folder)
                    case DownloadRefused(reason, may_pass):
                        tries += 1
                        if not may_pass:
                            raise ModelLoadError(str(message))
                        if tries >= max_tries:
                            raise NotAvailable(str(message))
                        pause = min(_PAUSE_SECONDS * 2 ** (tries - 1), _LONGEST_PAUSE_SECONDS)
                        logger.warning("%s; trying again in %.0f s", reason, pause)
                        await asyncio.sleep(pause)


async def fetch(
    name: HubName, model: ModelSettings, memory: MemorySettings, on_progress: OnProgress
) -> ModelSettings:
    """`model` with the folder of `name`, downloaded if `model` and `memory` allow to serve it.

    Raises what `download` does.
    """
    try:
        folder = await download(name, on_progress, partial(check_plan, model, memory))
    except (OSError, ValueError, msgspec.MsgspecError) as error:  # no process, or no message
        raise ModelLoadError(f"{name} can't be downloaded: {error}") from error
    return msgspec.structs.replace(model, path=str(folder))


async def look_up(name: HubName) -> DownloadPlan:
    """The download plan of `name`. Downloads its configuration and nothing else.

    Raises ModelLoadError and NotAvailable.
    """
    async with contextlib.aclosing(_messages(name)) as messages:
        async for message in messages:
            match message:
                case DownloadPlan():
                    return message
                case DownloadRefused(_, may_pass):
                    raise (NotAvailable if may_pass else ModelLoadError)(str(message))
    raise ModelLoadError(f"{name} can't be looked up")


async def _messages(name: HubName) -> AsyncGenerator[Message, None]:
    """The messages of one download process; the last is always `Done` or `DownloadRefused`.

    The process goes on after its `DownloadPlan` when the next message is asked for.
    """
    command = launch.command(_MODULE, name.repo, name.revision)
    environment = {**launch.environment(), **library_environment()}
    message: Message | None = None
    async with launch.run_process(command, environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        async for line in process.stdout:
            message = _DECODER.decode(line)
            yield message
            if isinstance(message, DownloadPlan):
                process.stdin.write(GO)
        if not isinstance(message, Done | DownloadRefused):
            status = await process.wait()
            yield DownloadRefused(f"the download ended with status {status}", may_pass=True)


def library_environment() -> dict[str, str]:
    """A silent hub library, and an absolute cache folder: the process starts in another one."""
    return {
        "HF_HUB_CACHE": str(hub_cache()),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_VERBOSITY": "error",
    }
