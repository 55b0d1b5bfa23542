"""Estimates of the device memory that work needs while it runs, learned from measured peaks."""

from __future__ import annotations

from collections import deque
from typing import Literal, NamedTuple

from vlm_server.interfaces import DeviceMemory

Work = Literal["encode", "prefill"]

_COLD_BYTES = {"encode": 4 << 20, "prefill": 1 << 20}
"""Bytes per token before any measurement: more than any model needs that fits one machine."""
_LAST_PEAKS = 32
"""Peaks of a size that count."""
_MIN_TOKENS = 33
"""The minimum of tokens that more are expected to need in proportion: fewer may be multiplied by
kernels of their own."""


class _Peak(NamedTuple):
    """Transient bytes of work on `num_tokens`."""

    num_tokens: int
    size_bytes: int


class MemoryEstimator:
    """Transient bytes of encodes and prefills, learned apart for each doubling of the tokens.

    They are not proportional to the tokens: where weights are dequantized to multiply many rows, 50
    tokens need nearly as much as 1,000.

    Peaks are those of the process, so nothing is learned from work that overlapped with other work.
    Memory that stays allocated afterwards (KV, features) is not transient.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._peaks: dict[Work, dict[int, deque[_Peak]]] = {"encode": {}, "prefill": {}}
        """The last peaks, by kind of work and the bits of the number of tokens."""
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

        That of the next larger size that was measured; beyond the largest work, proportional to
        the tokens: attention, which grows with the square, is computed in bounded blocks.
        """
        sizes = self._peaks[work]
        if not num_tokens:
            return 0
        for size in sorted(size for size in sizes if size >= num_tokens.bit_length()):
            if any(peak.num_tokens >= num_tokens for peak in sizes[size]):
                return max(peak.size_bytes for peak in sizes[size])
        largest = sizes[max(sizes)] if sizes else ()
        rates = [p.size_bytes / p.num_tokens for p in largest if p.num_tokens >= _MIN_TOKENS]
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
        if is_alone and is_typical and num_tokens:
            resident_bytes = max(start_bytes, self._memory.read().active_bytes)
            peak = _Peak(num_tokens, max(0, peak_bytes - resident_bytes))
            peaks = self._peaks[work].setdefault(num_tokens.bit_length(), deque(maxlen=_LAST_PEAKS))
            peaks.append(peak)

    def _fold(self) -> None:
        """Add the peak since the last call to the peaks of all work under way."""
        peak = self._memory.read_peak()
        self._peak_bytes = max(self._peak_bytes, peak)
        self._under_way = {
            work: (active, max(peak_before, peak))
            for work, (active, peak_before) in self._under_way.items()
        }
