"""A command at a real terminal (a pty), with the screen that a person sees."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pyte

from tests.support.daemons import PROGRAM

SECONDS = 30.0
COLUMNS, ROWS = 72, 24
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b_[^\x1b]*\x1b\\")
_DROPPED = ("COLUMNS", "NO_COLOR", "TMUX", "KITTY_WINDOW_ID", "TERM_PROGRAM", "CI")


class Session:
    """A command at a terminal of so many columns; `shown` is all its output."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], program: str, columns: int
    ) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        inherited = {name: value for name, value in os.environ.items() if name not in _DROPPED}
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
        self._screen = pyte.HistoryScreen(columns, ROWS, history=1000)
        self._screen.write_process_input = lambda reply: os.write(ours, reply.encode())
        self._stream = pyte.ByteStream(self._screen)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until `text` was shown `times` times."""
        self._wait(lambda: self.plain.count(text) >= times)
        assert self.plain.count(text) >= times, self.shown

    def wait_until_seen(self, text: str) -> None:
        """Wait until `text` stands on the screen."""
        self._wait(lambda: text in self.seen)
        assert text in self.seen, self.seen

    def wait_until_gone(self, text: str) -> None:
        """Wait until `text` stands on the screen no more."""
        self._wait(lambda: text not in self.seen)
        assert text not in self.seen, self.seen

    def ended(self) -> int:
        """Wait for the end; return the exit code."""
        self._wait(lambda: False)
        return self.process.wait(SECONDS)

    @property
    def plain(self) -> str:
        """The output without escape sequences for cursor and colours."""
        return CONTROL.sub("", self.shown)

    @property
    def seen(self) -> str:
        """The lines on the screen."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    @property
    def scrolled(self) -> str:
        """The lines that have scrolled away, and those on the screen."""
        above = [
            "".join(line[column].data for column in range(self._screen.columns)).rstrip()
            for line in self._screen.history.top
        ]
        return "\n".join([*above, self.seen])

    def _wait(self, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not is_over() and time.monotonic() < deadline and self._read():
            pass

    def _read(self) -> bool:
        if select.select([self._terminal], [], [], 0.1)[0]:
            try:
                data = os.read(self._terminal, 65536)
            except OSError:  # the other end is closed: Linux says it so
                return False
            self.shown += data.decode(errors="replace")
            self._stream.feed(data)
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
def session(
    *words: str, program: str = PROGRAM, columns: int = COLUMNS, **environment: str
) -> Iterator[Session]:
    """`vlm-server` with these arguments."""
    opened = Session(words, environment, program, columns)
    try:
        yield opened
    finally:
        opened.close()
