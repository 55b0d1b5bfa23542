"""Keeps a Mac from falling asleep while requests are in flight."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys

_CAFFEINATE = "/usr/bin/caffeinate"
_LINGER_SECONDS = 5.0
"""An agent's next request comes soon."""


class Awake:
    """An assertion against idle sleep, held by caffeinate(8). For use from the event loop only.

    It ends with a pipe of ours, and so also when this process dies or becomes another program. On
    Linux, servers do not fall asleep, and it does nothing.
    """

    def __init__(self) -> None:
        self._holder: subprocess.Popen[bytes] | None = None
        self._release: asyncio.TimerHandle | None = None

    def hold(self) -> None:
        """Keep the Mac awake: a request is in flight."""
        if self._release is not None:
            self._release.cancel()
            self._release = None
        if self._holder is None and sys.platform == "darwin":
            with contextlib.suppress(OSError):  # then it may fall asleep
                self._holder = subprocess.Popen(
                    [_CAFFEINATE, "-i", "/bin/cat"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # a terminal's Ctrl-C is for the front alone
                )

    def release(self) -> None:
        """No request is in flight: let the Mac fall asleep, a little later."""
        if self._holder is not None:
            loop = asyncio.get_running_loop()
            self._release = loop.call_later(_LINGER_SECONDS, self._end, self._holder)

    def _end(self, holder: subprocess.Popen[bytes]) -> None:
        self._holder = self._release = None
        assert holder.stdin is not None
        holder.stdin.close()
        holder.kill()
        holder.wait()
