"""Counts engines that end before any was ready, and says when and why to give up."""

from __future__ import annotations

import signal

_GIB = 1 << 30
MAX_FAILED_STARTS = 3
"""In a row. Something passing may end one; what ends three will end the next."""


class FailedStarts:
    """Of one model's engines, until the first is ready. After that a restart is always tried."""

    def __init__(self, memory_bytes: int) -> None:
        """`memory_bytes`: what a process may use here, for the message."""
        self._memory_bytes = memory_bytes
        self._count = 0
        self._has_been_ready = False

    def note_ready(self) -> None:
        self._has_been_ready = True

    def note_end(self, status: int | None, *, was_late: bool) -> str | None:
        """An engine has ended with `status`, negative for a signal, None if it never began.

        Returns why no other should be started, if that is so. `was_late`: it was ended because it
        did not get ready in time.
        """
        if self._has_been_ready:
            return None
        self._count += 1
        if self._count < MAX_FAILED_STARTS:
            return None
        cause = self._cause(status, was_late)
        return f"{self._count} engines in a row ended before they were ready; {cause}"

    def _cause(self, status: int | None, was_late: bool) -> str:
        if was_late:
            return "the last was not ready within engine.start_timeout_seconds"
        if status == -signal.SIGKILL:
            return (
                "the last was killed (SIGKILL), as the system does when memory runs out: this "
                f"process may use {self._memory_bytes / _GIB:.2f} GiB. Serve a smaller or a "
                "quantized checkpoint, or free memory"
            )
        if status is None:
            return "the last could not be started: the log says why"
        if status < 0:
            return f"the last was ended by {signal_name(-status)}: the log says more"
        return f"the last ended with status {status}: the log says more"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9, and so on."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
