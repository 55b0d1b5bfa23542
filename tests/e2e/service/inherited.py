"""A daemon on a socket that another process keeps open, as systemd does.

Its engine is scripted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.daemons import LOOK_SECONDS, SCRIPTED, Daemon

_ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3, inheritable=True)
os.environ |= {"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())}
os.execv(sys.executable, [sys.executable, "-m", sys.argv[2], "serve", *sys.argv[3:]])
"""


class Keeper:
    """Keeps a listening socket open, and starts daemons that inherit it."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.log = folder / "daemon.log"
        self.socket = socket.create_server((host, 0), backlog=128)
        self.port = int(self.socket.getsockname()[1])

    def start(self, *arguments: str, port: int | None = 0) -> Daemon:
        """Start a daemon; its settings name `port`, or the socket's port for 0."""
        descriptor = self.socket.fileno()
        words = [sys.executable, "-c", _ACTIVATE, str(descriptor), SCRIPTED, *arguments]
        if port is not None:
            words += ["--port", str(port or self.port)]
        return self._start(words, descriptor)

    @contextmanager
    def running(self, *arguments: str, port: int | None = 0) -> Iterator[Daemon]:
        """A ready daemon, ended afterwards."""
        daemon = self.start(*arguments, port=port)
        try:
            wait_for(daemon, "Ready: ")
            yield daemon
        finally:
            terminate(daemon)

    @contextmanager
    def running_at_end(self) -> Iterator[Callable[[], None]]:
        """Yields a function that starts a daemon, which is ended afterwards."""
        daemons: list[Daemon] = []
        try:
            yield lambda: daemons.append(self.start())
        finally:
            for daemon in daemons:
                terminate(daemon)

    @contextmanager
    def activated(self, tool: str) -> Iterator[Daemon]:
        """A daemon that `tool` starts at the first connection to its socket."""
        serve = [sys.executable, "-m", SCRIPTED, "serve", "--port", str(self.port)]
        daemon = self._start([tool, "-l", f"127.0.0.1:{self.port}", *_passed_on(), *serve])
        try:
            wait_for(daemon, "Listening on")
            yield daemon
        finally:
            terminate(daemon)

    def close(self) -> None:
        self.socket.close()

    def _start(self, words: list[str], *descriptors: int) -> Daemon:
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                words,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=descriptors,
                start_new_session=True,
            )
        return Daemon(process, self.port, self.log)


def _passed_on() -> list[str]:
    """Options of systemd-socket-activate, which passes on no other variables."""
    names = ("HOME", "PATH", "PYTHONPATH", "TMPDIR")
    return [f"--setenv={name}" for name in names if name in os.environ]


def terminate(daemon: Daemon) -> None:
    daemon.process.send_signal(signal.SIGTERM)
    try:
        daemon.process.wait(40)
    except subprocess.TimeoutExpired:
        os.killpg(daemon.process.pid, signal.SIGKILL)
        raise


def wait_for(daemon: Daemon, text: str, times: int = 1, seconds: float = 120.0) -> None:
    """Wait until `text` has been logged `times` times."""
    deadline = time.monotonic() + seconds
    while (log := daemon.log.read_text()).count(text) < times:
        assert daemon.process.poll() is None, log
        assert time.monotonic() < deadline, log
        time.sleep(LOOK_SECONDS)
