"""The history of engines: memory over the last hour, ends, failed starts.

Needs no timer: an engine that does nothing says nothing, and its memory stays as it was last told.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from vlm_server.protocol import MemoryStats

SAMPLE_SECONDS = 10
HISTORY_SECONDS = 3600
MAX_ENDS = 20


class MemorySample(msgspec.Struct, frozen=True):
    """The most of each that was seen in the `SAMPLE_SECONDS` from `at`, in seconds since 1970."""

    at: int
    active_bytes: int
    pool_bytes: int
    footprint_bytes: int


class EngineEnd(msgspec.Struct, frozen=True):
    """An engine process that ended although nobody had asked it to."""

    at: float
    reason: str


class MemoryHistory:
    """Samples of the last hour, the oldest first; the first one may be older: it held until then.

    `clock` gives seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._samples: deque[MemorySample] = deque(maxlen=HISTORY_SECONDS // SAMPLE_SECONDS)

    def add(self, memory: MemoryStats) -> None:
        """Add a reading of now."""
        at = int(self._clock()) // SAMPLE_SECONDS * SAMPLE_SECONDS
        sample = MemorySample(at, memory.active_bytes, memory.pool_bytes, memory.footprint_bytes)
        if self._samples and self._samples[-1].at == at:
            sample = _larger(self._samples.pop(), sample)
        self._samples.append(sample)

    @property
    def samples(self) -> Sequence[MemorySample]:
        oldest = self._clock() - HISTORY_SECONDS
        while len(self._samples) > 1 and self._samples[1].at <= oldest:
            self._samples.popleft()
        return self._samples


def reason_of_end(status: int | None, hung: str | None) -> str:
    """Why an engine ended.

    `status` is its exit status, negative for a signal and None if it never began; `hung` says what
    it was ended for, if it was.
    """
    if hung is not None:
        return f"did not get on ({hung}) and was ended"
    if status is None:
        return "could not be started"
    if status < 0:
        return f"was ended by {signal_name(-status)}"
    return f"ended with status {status}"


def _larger(one: MemorySample, other: MemorySample) -> MemorySample:
    return MemorySample(
        one.at,
        max(one.active_bytes, other.active_bytes),
        max(one.pool_bytes, other.pool_bytes),
        max(one.footprint_bytes, other.footprint_bytes),
    )


_GIB = 1 << 30
MAX_FAILED_STARTS = 3
"""In a row. Something passing may end one; what ends three will end the next."""


class FailedStarts:
    """Counts one model's engines that end before the first was ready, to give up at some point.

    Once one was ready, a restart is always tried.
    """

    def __init__(self, memory_bytes: int) -> None:
        """`memory_bytes`: what a process may use here, for the message."""
        self._memory_bytes = memory_bytes
        self._count = 0
        self._has_been_ready = False

    def record_ready(self) -> None:
        self._has_been_ready = True

    def record_end(self, status: int | None, *, was_late: bool) -> str | None:
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
