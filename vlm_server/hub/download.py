"""Runs the process that downloads, passes on what it says, and ends it with who waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec

from vlm_server.errors import ModelLoadError, NotAvailable
from vlm_server.hub.find import hub_cache
from vlm_server.hub.messages import GO, Done, Message, Plan, Progress, Refused
from vlm_server.hub.names import HubName
from vlm_server.hub.survey import check_plan
from vlm_server.platform.child import launch
from vlm_server.settings import Memory, Model

logger = logging.getLogger(__name__)

_DECODER = msgspec.json.Decoder(Message)
_MAX_LINE_BYTES = 16 << 20
_MODULE = "vlm_server.hub.fetch"
_FEW_TRIES, _MANY_TRIES = 3, 10
"""In a row that bring nothing, before a hub is given up: one that never answered, and one that
did. With the pauses between them, which double up to the longest, the latter take some minutes."""
_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 60.0

OnProgress = Callable[[Progress], None]
Approve = Callable[[Plan], Awaitable[None]]


async def download(name: HubName, on_progress: OnProgress, approve: Approve) -> Path:
    """The folder of `name`, once all that the loader reads is in the hub's cache.

    `approve` is shown what will be fetched, and raises to forbid it. Raises ModelLoadError if
    it can't be had, NotAvailable if it may be had later. Cancelling kills the process; what it has
    fetched is kept.
    """
    most, tries, allowed = 0, 0, _FEW_TRIES
    while True:
        async with contextlib.aclosing(_messages(name)) as messages:
            async for message in messages:
                match message:
                    case Plan():
                        allowed = _MANY_TRIES
                        await approve(message)
                    case Progress(done_bytes=done):
                        tries = 0 if done > most else tries
                        most = max(most, done)
                        on_progress(message)
                    case Done(folder):
                        return Path(folder)
                    case Refused(reason, may_pass):
                        tries += 1
                        if not may_pass:
                            raise ModelLoadError(reason)
                        if tries >= allowed:
                            raise NotAvailable(reason)
                        pause = min(_PAUSE_SECONDS * 2 ** (tries - 1), _LONGEST_PAUSE_SECONDS)
                        logger.warning("%s; trying again in %.0f s", reason, pause)
                        await asyncio.sleep(pause)


async def fetch(name: HubName, model: Model, memory: Memory, on_progress: OnProgress) -> Model:
    """`model` with the folder of `name`, which is downloaded if it can be served as they say.

    Raises what `download` does.
    """
    try:
        folder = await download(name, on_progress, partial(check_plan, model, memory))
    except (OSError, ValueError, msgspec.MsgspecError) as error:  # no process, or what no one reads
        raise ModelLoadError(f"{name} can't be downloaded: {error}") from error
    return msgspec.structs.replace(model, path=str(folder))


async def look_up(name: HubName) -> Plan:
    """What a download of `name` would do. Fetches its configuration and nothing else.

    Raises ModelLoadError and NotAvailable.
    """
    async with contextlib.aclosing(_messages(name)) as messages:
        async for message in messages:
            match message:
                case Plan():
                    return message
                case Refused(reason, may_pass):
                    raise (NotAvailable if may_pass else ModelLoadError)(reason)
    raise ModelLoadError(f"{name} can't be looked up")


async def _messages(name: HubName) -> AsyncGenerator[Message, None]:
    """All that one process says, whose end is always told. It goes on after its `Plan`, once that
    was taken."""
    process = await asyncio.create_subprocess_exec(
        *launch.command(_MODULE, name.repo, name.revision),
        env={**launch.environment(), **_environment()},
        cwd=launch.FOLDER,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MAX_LINE_BYTES,
        start_new_session=True,  # a terminal's Ctrl-C is for us alone
    )
    assert process.stdin is not None
    assert process.stdout is not None
    message: Message | None = None
    try:
        async for line in process.stdout:
            message = _DECODER.decode(line)
            yield message
            if isinstance(message, Plan):
                process.stdin.write(GO)
        if not isinstance(message, Done | Refused):
            status = await process.wait()
            yield Refused(f"the download ended with status {status}", may_pass=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _environment() -> dict[str, str]:
    """The hub's library says nothing by itself, and a relative path means the same folder."""
    return {
        "HF_HUB_CACHE": str(hub_cache()),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_VERBOSITY": "error",
    }
