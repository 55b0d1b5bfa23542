"""What is remembered of engines: their memory over the last hour, and how they ended.

Needs no timer: an engine that does nothing says nothing, and its memory stays as it was last told.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from vlm_server.protocol import MemoryStats
from vlm_server.supervisor.failed_starts import signal_name

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
        """Note a reading of now."""
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
