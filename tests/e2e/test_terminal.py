"""The program at a real terminal (a pty): its output, and Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hub.fixtures import hub
from tests.hub.server import Hub, add
from tests.support.daemons import PROGRAM, SCRIPTED, Daemon, with_settings
from tests.support.images import one_shape
from tests.unit.cli import stalling
from vlm_server.models import EMBEDDED

__all__ = ["hub"]

SECONDS = 40.0
COLUMNS = 72
ADDRESS = re.compile(r"address +(http://127\.0\.0\.1:\d+/v1)")
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b_[^\x1b]*\x1b\\")
pytestmark = pytest.mark.e2e


class Session:
    """A command at a terminal of `COLUMNS` columns; `shown` is all its output."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], program: str = PROGRAM
    ) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        dropped = ("COLUMNS", "NO_COLOR", "TMUX", "KITTY_WINDOW_ID", "TERM_PROGRAM", "CI")
        inherited = {name: value for name, value in os.environ.items() if name not in dropped}
        self.process = subprocess.Popen(
            [sys.executable, "-m", program, *words],
            env={**inherited, "TERM": "xterm-256color", **environment},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(theirs)
        self._terminal = ours
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until `text` was shown `times` times."""
        deadline = time.monotonic() + SECONDS
        while self.plain.count(text) < times and time.monotonic() < deadline:
            if not self._read():
                break
        assert self.plain.count(text) >= times, self.shown

    def ended(self) -> int:
        """Wait for the end; return the exit code."""
        deadline = time.monotonic() + SECONDS
        while self._read() and time.monotonic() < deadline:
            pass
        return self.process.wait(SECONDS)

    @property
    def plain(self) -> str:
        """The output without escape sequences for cursor and colours."""
        return CONTROL.sub("", self.shown)

    def _read(self) -> bool:
        if select.select([self._terminal], [], [], 0.1)[0]:
            try:
                data = os.read(self._terminal, 65536)
            except OSError:  # the other end is closed: Linux says it so
                return False
            self.shown += data.decode(errors="replace")
            return bool(data)
        return self.process.poll() is None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def session(*words: str, program: str = PROGRAM, **environment: str) -> Iterator[Session]:
    """`vlm-server` with these arguments."""
    opened = Session(words, environment, program)
    try:
        yield opened
    finally:
        opened.close()


def test_serve_prints_little_and_stops_at_ctrl_c() -> None:
    with session("serve", "--port", "0", program=SCRIPTED) as serve:
        serve.wait_for("page")
        assert "demo" in serve.plain
        serve.wait_for("Ctrl-C stops the daemon.")
        assert ADDRESS.search(serve.plain)
        assert "loading the weights" in serve.plain
        command = next(line for line in serve.plain.split("\n") if "vlm-server ask" in line)
        assert "--url http://127.0.0.1:" in command
        assert " INFO " not in serve.plain
        assert "curl" not in serve.plain
        serve.type("\x03")
        assert serve.ended() == 0
    assert serve.shown.count("\x1b[?25l") == serve.shown.count("\x1b[?25h")  # the cursor is back


def test_ctrl_c_stops_serve_during_load() -> None:
    slow = with_settings("model.name=slow")
    with session("serve", "--port", "0", *slow, program=SCRIPTED, NO_COLOR="1") as serve:
        serve.wait_for("loading the weights")
        serve.type("\x03")
        assert serve.ended() == 0
        assert "Traceback" not in serve.shown
        assert "\x1b[1m" not in serve.shown


def test_serve_reports_oversized_model_in_one_line() -> None:
    with session("serve", "--port", "0", "--set", "memory.max_bytes=1000000") as serve:
        assert serve.ended() == 3
        assert serve.plain.count("do not fit") == 1
        assert serve.plain.split("\n")[-2].strip().startswith("vlm-server: ")


def test_ask_holds_conversation_at_prompt(daemon: Daemon, tmp_path: Path) -> None:
    """Ctrl-C at the prompt only empties the line."""
    image = tmp_path / "picture.png"
    one_shape("circle", "red").save(image)
    with session("ask", "--url", f"{daemon.url}/v1", str(image)) as ask:
        ask.wait_for(">>> ")
        ask.type("What shape is this?\n")
        ask.wait_for(">>> ", 2)
        assert "circle" in ask.plain
        ask.type("nonsense")
        ask.wait_for("nonsense")
        time.sleep(0.5)  # Python's readline misses a Ctrl-C until it waits for keys again
        ask.type("\x03")
        ask.wait_for(">>> ", 3)
        ask.type("What colour is it?\n")
        ask.wait_for(">>> ", 4)
        assert "red" in ask.plain
        ask.type("\x04")
        assert ask.ended() == 0
        assert "Traceback" not in ask.shown


@pytest.mark.parametrize(("stage", "is_heard"), [("prefill", False), ("decode", True)])
def test_ctrl_c_stops_answer_and_keeps_conversation(stage: str, is_heard: bool) -> None:
    with stalling.daemon(stage) as (url, reached), session("ask", "--url", url) as ask:
        ask.wait_for(">>> ")
        ask.type("What?\n")
        assert reached.wait(SECONDS)
        ask.wait_for("a red" if is_heard else "waiting for the answer")
        ask.type("\x03")
        ask.wait_for(">>> ", 2)
        ask.type("\x04")
        assert ask.ended() == 0
        assert "Traceback" not in ask.shown


def test_ctrl_c_ends_daemon_started_by_ask() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with session("ask", "--set", f"server.port={port}", "What?") as ask:
        ask.wait_for("starting one")
        ask.wait_for("loading the weights")
        children = children_of(ask.process.pid)
        assert children
        ask.type("\x03")
        assert ask.ended() == -signal.SIGINT
        assert not any(Path(f"/proc/{child}").exists() for child in children)
        assert "Traceback" not in ask.shown


def children_of(pid: int) -> list[int]:
    """The child processes of the main thread."""
    return [
        int(pid_text) for pid_text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ]


@pytest.mark.whole
def test_pull_shows_progress_and_is_resumable(hub: Hub) -> None:
    """Ctrl-C loses no downloaded bytes."""
    add(hub, "org/model", {path.name: path.read_bytes() for path in EMBEDDED.iterdir()})
    hub.seconds_per_mib = 0.4
    with session("pull", "org/model") as pull:
        pull.wait_for("downloading model.saf")
        pull.wait_for("MB of 15 MB")
        pull.type("\x03")
        assert pull.ended() == -signal.SIGINT
        assert "goes on from there" in pull.plain
    assert max(map(len, pull.plain.replace("\r", "\n").split("\n"))) <= 2 * COLUMNS
