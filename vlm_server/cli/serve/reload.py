"""The end of `serve`: by a signal, by the end of its standard input, or to start again.

It starts again at SIGHUP, or when its settings have changed and are valid. Running answers are
finished, and the process replaces itself by `exec`: its id and its inherited sockets stay, so that
no client is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from vlm_server.cli.serve.listener import Listener
from vlm_server.errors import VlmServerError
from vlm_server.settings import Settings

logger = logging.getLogger(__name__)
_QUIET_SECONDS = 2.0
"""Age of a settings file from which its writing counts as complete."""
Version = tuple[int, int, int]


class Shutdown:
    """A request to end the daemon, which calls `wake`. A stop outweighs a restart."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.is_stop = False
        """Whether the daemon ends for good."""
        self._is_restart = False

    @property
    def is_restart(self) -> bool:
        """Whether the daemon starts again afterwards."""
        return self._is_restart and not self.is_stop

    def stop(self) -> None:
        """End for good."""
        self.is_stop = True
        self._wake()

    def start_again(self) -> None:
        """End, and start again."""
        self._is_restart = True
        self._wake()


def stop_on_signals(stop: Callable[[], None]) -> None:
    """Call `stop` at the first SIGTERM or SIGINT; a second one ends the process immediately."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def on_first() -> None:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        stop()

    for number in signals:
        loop.add_signal_handler(number, on_first)


def stop_when_input_ends(stop: Callable[[], None]) -> None:
    """Call `stop` when stdin is closed, so that a child ends with its parent, even a killed one."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        with contextlib.suppress(RuntimeError):  # the loop has already ended
            loop.call_soon_threadsafe(stop)

    threading.Thread(target=wait, name="stdin", daemon=True).start()


class Reloader:
    """Decision whether the daemon starts again; `path` is the file of its settings.

    Created before the settings are read, so that no change is missed. SIGHUP is ignored until
    `listen`.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen = _version(path)
        self._is_checking = False
        self._is_asked = False
        """Whether SIGHUP has come since the settings were read."""
        self._tasks = set[asyncio.Task[None]]()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def check_with(self, settings: Settings, load: Callable[[], Settings]) -> None:
        """Set the current settings, and the function that reads and checks new ones."""
        self._settings = settings
        self._load = load

    def listen(self, restart: Callable[[], None]) -> None:
        """Call `restart` from now on at SIGHUP, and if `check_file` finds new settings."""
        self._restart = restart
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_signal)

    def _on_signal(self) -> None:
        self._is_asked = True
        task = asyncio.create_task(self._check())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def check_file(self) -> None:
        """Check the settings if their file has changed, and not in the last two seconds."""
        version = _version(self._path)
        if version in (None, self._seen) or time.time_ns() - version[0] < _QUIET_SECONDS * 1e9:
            return
        await self._check()

    async def _check(self) -> None:
        """Check the settings, and again if SIGHUP arrives during the check."""
        if self._is_checking:
            return
        self._is_checking = True
        try:
            is_restart = await self._is_restart_wanted()
            while self._is_asked and not is_restart:
                is_restart = await self._is_restart_wanted()
        finally:
            self._is_checking = False
        if is_restart:
            self._restart()

    async def _is_restart_wanted(self) -> bool:
        is_asked, self._is_asked = self._is_asked, False
        self._seen = _version(self._path)
        try:
            settings = await asyncio.to_thread(self._load)
        except (VlmServerError, OSError) as error:
            logger.error("the new settings are refused, the old ones stay in force: %s", error)
            return False
        if not is_asked and settings == self._settings:
            return False
        logger.info("starting again%s", "" if is_asked else ": the settings have changed")
        return True


def start_again(listener: Listener) -> NoReturn:
    """Become the program that this process was started as. Raises OSError."""
    listener.hand_over(os.environ)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the new program listens to it
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606  our own words


def _version(path: Path | None) -> Version | None:
    try:
        status = path.stat() if path is not None else None
    except OSError:  # between two versions, perhaps
        status = None
    return (status.st_mtime_ns, status.st_size, status.st_ino) if status else None
