"""What ends `serve`: a signal, the end of its standard input, or the wish to start again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable


class Ending:
    """How the daemon ends. `wake` is called when it is to end; to stop outweighs a restart."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._is_stop = False
        self._is_restart = False

    @property
    def is_restart(self) -> bool:
        """Whether to start again afterwards."""
        return self._is_restart and not self._is_stop

    def stop(self) -> None:
        """End for good."""
        self._is_stop = True
        self._wake()

    def start_again(self) -> None:
        """End, and start again."""
        self._is_restart = True
        self._wake()


def stop_on_signals(stop: Callable[[], None]) -> None:
    """The first SIGTERM or SIGINT calls `stop`; a second one ends the process at once."""
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
