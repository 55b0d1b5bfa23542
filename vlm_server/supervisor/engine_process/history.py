"""The history of engines: memory and tokens over the last hour, ends, failed starts.

Needs no timer: an idle engine reports nothing, and its memory stays as last reported.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from vlm_server.protocol import MemoryStats
from vlm_server.sizes import memory_size

SAMPLE_SECONDS = 10
HISTORY_SECONDS = 3600
MAX_ENDS = 20


class MemorySample(msgspec.Struct, frozen=True):
    """The maximum of each figure in the `SAMPLE_SECONDS` from `at`, in seconds since 1970."""

    at: int
    active_bytes: int
    pool_bytes: int
    footprint_bytes: int
    generated_tokens: int
    """Since the engine's start: what it grew by since the sample before was written meanwhile."""


class EngineEnd(msgspec.Struct, frozen=True):
    """The unexpected end of an engine process."""

    at: float
    reason: str


class MemoryHistory:
    """Samples of the last hour, the oldest first; the first may be older, as the last known value.

    `clock` gives seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._samples: deque[MemorySample] = deque(maxlen=HISTORY_SECONDS // SAMPLE_SECONDS)

    def add(self, memory: MemoryStats, generated_tokens: int) -> None:
        at = int(self._clock()) // SAMPLE_SECONDS * SAMPLE_SECONDS
        sizes = (memory.active_bytes, memory.pool_bytes, memory.footprint_bytes)
        sample = MemorySample(at, *sizes, generated_tokens)
        if self._samples and self._samples[-1].at == at:
            last_values = msgspec.structs.astuple(self._samples.pop())
            sample = MemorySample(*map(max, last_values, msgspec.structs.astuple(sample)))
        self._samples.append(sample)

    @property
    def samples(self) -> Sequence[MemorySample]:
        oldest = self._clock() - HISTORY_SECONDS
        while len(self._samples) > 1 and self._samples[1].at <= oldest:
            self._samples.popleft()
        return self._samples


def reason_of_end(status: int | None, hung: str | None) -> str:
    """Why an engine ended, as the predicate of a sentence.

    status: its exit status, negative for a signal and None if it never began. hung: the kind of
    threads that made no progress, if it was ended for that.
    """
    if hung is not None:
        return f"made no progress ({hung}) and was ended"
    if status is None:
        return "could not be started"
    if status < 0:
        guess = ", as systems do without memory" if status == -signal.SIGKILL else ""
        return f"was ended by {signal_name(-status)}{guess}"
    return f"ended with status {status}"


MAX_FAILED_STARTS = 3
"""Failed starts in a row: a passing cause may end one, but not three."""


class FailedStarts:
    """Counts one model's engines that end before the first was ready, to give up at some point.

    Once one was ready, a restart is always tried.
    """

    def __init__(self, memory_bytes: int) -> None:
        """memory_bytes: the memory that a process may use here, for the message."""
        self._memory_bytes = memory_bytes
        self._count = 0
        self._has_been_ready = False

    def record_ready(self) -> None:
        self._has_been_ready = True

    def record_end(self, status: int | None, *, was_late: bool) -> str | None:
        """Record the end of an engine; returns the reason to start no other, if there is one.

        status: as in `reason_of_end`. was_late: it was ended since it was not ready in time.
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
                f"process may use {memory_size(self._memory_bytes)}. Serve a smaller or a "
                "quantized checkpoint, or free memory"
            )
        return f"the last {reason_of_end(status, None)}: the log says why"


def signal_name(number: int) -> str:
    """`SIGKILL` for 9, and so on."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
