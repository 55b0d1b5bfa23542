"""The measured times of device calls, and the power of two that a size counts as."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

MAX_IDLE_BATCH_SECONDS = 0.25
"""The maximum time of a batch while no sequence decodes, since a new request waits for it. While
sequences decode, the limit of batches and chunks is `max_step_seconds`."""

AS_LONG_AS_ONE = 1.1
"""A batch takes as long as one image or prompt if its time is at most this multiple."""

_NUM_TIMES = 3
_MIN_TIMES = 2
"""The number of calls to go by: the first of a kind may compile kernels and schedule attention."""

Kind = TypeVar("Kind", bound=Hashable)
"""A class of calls that are assumed to take equally long."""


class CallTimes(Generic[Kind]):
    """The times of the last three calls of each kind.

    The best of the three counts, since a call may be slow for another reason. Old times are
    dropped, so that a kind that was slow is tried again.
    """

    def __init__(self, max_age: int) -> None:
        """max_age: the number of later calls, of any kind, after which a time is dropped."""
        self._max_age = max_age
        self._num_calls = 0
        self._last: dict[Kind, deque[tuple[int, float]]] = {}
        """The call's number and seconds, by kind."""

    def record(self, kind: Kind, seconds: float) -> None:
        """Record the time of a call, or its time per token; infinite for a failed call."""
        self._num_calls += 1
        last_times = self._last.setdefault(kind, deque(maxlen=_NUM_TIMES))
        last_times.append((self._num_calls, seconds))

    def kinds(self) -> list[Kind]:
        """The kinds with a known time."""
        return [kind for kind in self._last if self._times(kind)]

    def is_measured(self, kind: Kind) -> bool:
        """Whether enough times of this kind are known."""
        return len(self._times(kind)) >= _MIN_TIMES

    def best(self, kind: Kind) -> float:
        """The shortest known time; infinite if there is none."""
        return min(self._times(kind), default=math.inf)

    def _times(self, kind: Kind) -> list[float]:
        since = self._num_calls - self._max_age
        return [seconds for number, seconds in self._last.get(kind, ()) if number > since]


def power_of_two(num_tokens: int) -> int:
    return 1 << max(0, num_tokens - 1).bit_length()
