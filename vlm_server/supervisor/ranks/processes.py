"""The processes of the ranks after the first, here or on other machines.

`mlx.launch` would start them, too, but it keeps a core busy for as long as they run
(docs/decisions/0049-let-every-rank-run-the-same-plans.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from vlm_server.platform import machine
from vlm_server.platform.child import launch
from vlm_server.protocol.ranks import Rank
from vlm_server.settings import Settings
from vlm_server.supervisor.ranks.hostfile import LOCAL, Host, ranks_of, read_hostfile

logger = logging.getLogger(__name__)

_MODULE = "vlm_server.engine.follower"
_END_SECONDS = 2.0
_KEPT = ("PYTHONPATH", "PYTHONSAFEPATH")
"""What another machine is told of our environment: it has the program in the same folder."""


class RankProcesses:
    """Those of one engine; they end with it."""

    def __init__(self, first: Rank | None, processes: Sequence[asyncio.subprocess.Process]) -> None:
        self.first = first
        """What the engine process is told; None if it is to have all of the model."""
        self._processes = processes

    @classmethod
    async def start(cls, settings: Settings, environment: Mapping[str, str]) -> Self:
        """Start what `distributed.hosts` names; `environment` is added to ours.

        Raises ConfigError for a file that can't be used, and OSError if a process can't be started.
        """
        if not settings.distributed.hosts:
            return cls(None, ())
        hostfile = read_hostfile(Path(settings.distributed.hosts))
        first, *others = ranks_of(hostfile, settings.distributed.port, settings.log)
        started = cls(first, [])
        try:
            for host, rank in zip(hostfile.hosts[1:], others, strict=True):
                started._processes = [*started._processes, await _started(host, rank, environment)]
        except BaseException:
            await started.end()
            raise
        return started

    async def first_to_end(self) -> str:
        """Wait until one of them has ended by itself; what can be said of that."""
        waits = [asyncio.ensure_future(process.wait()) for process in self._processes]
        if not waits:
            await asyncio.Event().wait()
        try:
            (ended, *_), _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        number, status = waits.index(ended) + 1, ended.result()
        await asyncio.sleep(_END_SECONDS)  # rank 0 may have more to say, and end by itself
        return f"the process of rank {number} has ended with status {status}: the log says more"

    async def end(self) -> None:
        """They end with their input; those that don't are killed."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for number, process in enumerate(self._processes, start=1):
            try:
                await asyncio.wait_for(process.wait(), _END_SECONDS)
            except TimeoutError:
                logger.warning("rank %d does not end by itself: killing it", number)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


async def _started(
    host: Host, rank: Rank, environment: Mapping[str, str]
) -> asyncio.subprocess.Process:
    command = launch.command(_MODULE)
    ours = launch.environment(with_preload=True)
    if host.ssh == LOCAL:
        ours |= {"HF_HUB_OFFLINE": "1", **machine.thread_environment(), **environment}
    else:
        kept = {name: ours[name] for name in _KEPT if name in ours} | {"HF_HUB_OFFLINE": "1"}
        words = ["exec", "env", *(f"{name}={value}" for name, value in kept.items()), *command]
        command = ["ssh", "-o", "BatchMode=yes", "--", host.ssh, shlex.join(words)]
        ours = dict(os.environ)
    process = await asyncio.create_subprocess_exec(
        *command, env=ours, cwd=launch.FOLDER, stdin=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(rank) + b"\n")
    return process
