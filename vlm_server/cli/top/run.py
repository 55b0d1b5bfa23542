"""Steps of `vlm-server top`: read, draw, wait for a key or the next second."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from vlm_server.cli import options
from vlm_server.cli.client.daemon import Daemon, address_of
from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.cli.top.frame import Frame, frame_of, read

_READ_SECONDS = 5.0
_PIPE_COLUMNS = 120
_RATE_SECONDS = 3.0
"""Time over which rates are measured."""
_REPORT_SECONDS = 2.0
"""Time in which an engine has reported again."""
WaitForKey = Callable[[float], str]
_LEAVING = frozenset("qQ\x04")
_ESCAPE = "\x1b"
"""The key alone; other keys send more after it."""


def run(arguments: argparse.Namespace) -> int:
    """Show frames as `arguments` say. Raises CommandFailed if no daemon answers at first."""
    settings = options.load_settings(arguments)
    url, api_key = address_of(arguments, settings)
    with Daemon(url, api_key, seconds=_READ_SECONDS) as daemon:
        if arguments.json:
            return _print_json(daemon, arguments.interval, is_once=arguments.once)
        if arguments.once or not sys.stdout.isatty() or not sys.stdin.isatty():
            return _print_once(daemon, arguments.interval)
        return _watch(daemon, arguments.interval)


class Readings:
    """The readings of the last seconds, of which frames are made."""

    def __init__(self, daemon: Daemon) -> None:
        """Raises CommandFailed."""
        self._daemon = daemon
        self._readings = deque([(time.monotonic(), read(daemon))])

    def frame(self) -> Frame:
        return frame_of(self._daemon.url, [reading for _, reading in self._readings])

    def next_frame(self) -> Frame:
        """The frame of another reading. Raises CommandFailed."""
        now = time.monotonic()
        self._readings.append((now, read(self._daemon)))
        while len(self._readings) > 2 and self._readings[1][0] < now - _RATE_SECONDS:
            self._readings.popleft()
        return self.frame()


def _print_json(daemon: Daemon, interval: float, *, is_once: bool) -> int:
    readings = Readings(daemon)
    while True:
        time.sleep(max(interval, _REPORT_SECONDS) if is_once else interval)
        print(msgspec.json.encode(readings.next_frame()).decode(), flush=True)
        if is_once:
            return 0


def _print_once(daemon: Daemon, interval: float) -> int:
    from rich.console import Console

    from vlm_server.cli.top.screen import Screen

    readings, screen = Readings(daemon), Screen()
    time.sleep(max(interval, _REPORT_SECONDS))
    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    console.print(screen.draw(readings.next_frame(), console.width))
    return 0


def _watch(daemon: Daemon, interval: float) -> int:
    """Draw frames on the whole terminal until a key says to leave."""
    from rich.console import Console
    from rich.live import Live

    from vlm_server.cli.top.screen import Screen

    readings, screen, is_paused = Readings(daemon), Screen(), False
    frame, console = readings.frame(), Console()
    with (
        _keys() as wait_for_key,
        Live(screen=True, auto_refresh=False, console=console, redirect_stdout=False) as live,
    ):
        while True:
            live.update(screen.draw(frame, console.width, console.height), refresh=True)
            keys = wait_for_key(interval)
            if keys == _ESCAPE or not _LEAVING.isdisjoint(keys):
                return 0
            screen.shown += keys.count("m")
            if "p" in keys:
                is_paused = not is_paused
                screen.note = "paused: p goes on" if is_paused else ""
            if keys or is_paused:
                continue
            try:
                frame, screen.note = readings.next_frame(), ""
            except CommandFailed as error:  # it may come back
                screen.note = str(error)
            screen.take_rate(frame)


@contextlib.contextmanager
def _keys() -> Iterator[WaitForKey]:
    """A function that waits so many seconds for a key; it returns what was typed, or nothing."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)

    def wait(seconds: float) -> str:
        if not select.select([terminal], [], [], seconds)[0]:
            return ""
        return os.read(terminal, 16).decode(errors="replace") or "\x04"

    try:
        yield wait
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
