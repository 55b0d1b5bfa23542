"""Start of our own Python processes, which import nothing from their working folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import site
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import vlm_server
from vlm_server.platform import machine

FOLDER = "/"
"""The working folder of processes that need none; only root can place files in it."""
_MAX_LINE_BYTES = 16 << 20
_ROOT = str(Path(vlm_server.__file__).parents[1])
"""The folder that `vlm_server` was imported from."""


def command(module: str, *arguments: str) -> list[str]:
    """The command that runs `module` as a program.

    `-m` alone would put the working folder first on `sys.path`: a checkpoint's folder with a
    `queue.py` in it, say. `-P` leaves it out.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def environment(*, with_preload: bool = False) -> dict[str, str]:
    """Our environment for a child: it imports what we do, and nothing from the working folder.

    Libraries that `LD_PRELOAD` names are only for those that run models.
    """
    inherited = {name: os.environ[name] for name in os.environ if name != "LD_PRELOAD"}
    if with_preload and (preloaded := os.environ.get("LD_PRELOAD")):
        inherited["LD_PRELOAD"] = preloaded
    folders = inherited.pop("PYTHONPATH", "").split(os.pathsep)
    # An empty entry stands for the working folder, and a relative one begins there.
    absolute = [folder for folder in folders if os.path.isabs(folder)]
    if _ROOT not in (*absolute, *site.getsitepackages()):
        absolute = [_ROOT, *absolute]
    if absolute:
        inherited["PYTHONPATH"] = os.pathsep.join(absolute)
    return {**inherited, "PYTHONSAFEPATH": "1"}


def model_environment() -> dict[str, str]:
    """Our environment for a process that runs a model: nothing is downloaded there."""
    return {
        **machine.thread_environment(),
        **environment(with_preload=True),
        "HF_HUB_OFFLINE": "1",
    }


@contextlib.asynccontextmanager
async def run_process(
    words: Sequence[str], environment: Mapping[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process with pipes to its input and output, which is killed at the end."""
    process = await asyncio.create_subprocess_exec(
        *words,
        env=environment,
        cwd=FOLDER,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MAX_LINE_BYTES,
        start_new_session=True,  # a terminal's Ctrl-C is for us alone
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def exit_status(
    arguments: Sequence[str], environment: Mapping[str, str], seconds: float
) -> int | None:
    """The exit status of Python with these arguments; None if it can't start or end in time."""
    try:
        process = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=FOLDER,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.returncode
