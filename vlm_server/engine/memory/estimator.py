"""Estimates of the device memory that work needs while it runs, learned from measured peaks."""

from __future__ import annotations

from collections import deque
from typing import Literal

from vlm_server.interfaces import DeviceMemory

Work = Literal["encode", "prefill"]

_COLD_BYTES = {"encode": 4 << 20, "prefill": 1 << 20}
"""Bytes per token before any measurement: more than any model needs that fits one machine."""
_NUM_RATES = 32
_MIN_TOKENS = 32
"""The minimum number of tokens to learn from: with fewer, the fixed part would dominate."""


class MemoryEstimator:
    """Transient bytes per token of encodes and prefills: the maximum of the last ones.

    Peaks are those of the process, so nothing is learned from work that overlapped with other work.
    Memory that stays allocated afterwards (KV, features) is not transient.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._rates: dict[Work, deque[float]] = {
            "encode": deque(maxlen=_NUM_RATES),
            "prefill": deque(maxlen=_NUM_RATES),
        }
        """Bytes per token."""
        self._under_way: dict[Work, tuple[int, int]] = {}
        """Active bytes at the start of work under way, and their peak since, by its kind."""
        self._overlapping: set[Work] = set()
        """Kinds of work under way that did not run alone."""
        self._peak_bytes = 0
        self.feature_bytes = 0
        """The maximum of measured feature bytes per media token."""

    @property
    def peak_bytes(self) -> int:
        """The peak of active bytes since the start."""
        self._fold()
        return self._peak_bytes

    def bytes_for(self, work: Work, num_tokens: int) -> int:
        """The maximum of transient bytes of work on `num_tokens`.

        Proportional to the tokens: the fixed part makes it an overestimate for more tokens than
        measured, and attention, which grows with the square, is computed in bounded blocks.
        """
        rates = self._rates[work]
        return int(max(rates, default=_COLD_BYTES[work]) * num_tokens)

    def begin(self, work: Work) -> None:
        """Start to measure work of this kind, until `end`."""
        self._fold()
        active = self._memory.read().active_bytes
        self._under_way[work] = (active, active)
        if len(self._under_way) > 1:
            self._overlapping.update(self._under_way)

    def end(self, work: Work, num_tokens: int, *, is_typical: bool = True) -> None:
        """Learn from the peak of the work under way of this kind, if it `is_typical`."""
        self._fold()
        start_bytes, peak_bytes = self._under_way.pop(work)
        is_alone = work not in self._overlapping
        self._overlapping.discard(work)
        if is_alone and is_typical and num_tokens >= _MIN_TOKENS:
            resident_bytes = max(start_bytes, self._memory.read().active_bytes)
            self._rates[work].append(max(0, peak_bytes - resident_bytes) / num_tokens)

    def _fold(self) -> None:
        """Add the peak since the last call to the peaks of all work under way."""
        peak = self._memory.read_peak()
        self._peak_bytes = max(self._peak_bytes, peak)
        self._under_way = {
            work: (active, max(peak_before, peak))
            for work, (active, peak_before) in self._under_way.items()
        }
