"""How much device memory work needs while it runs, learned from measured peaks."""

from __future__ import annotations

from collections import deque
from typing import Literal

from vlm_server.interfaces import DeviceMemory

Work = Literal["encode", "prefill"]

_COLD_BYTES = {"encode": 4 << 20, "prefill": 1 << 20}
"""Per token, before anything was measured: more than any model needs that fits one machine."""
_LAST = 32
_LEAST_TOKENS = 32
"""With fewer, the fixed part would be taken for the part that each token needs."""


class MemoryEstimator:
    """Transient bytes per token of encodes and prefills: the most that the last ones needed.

    Peaks belong to the process, so nothing is learned from work that ran beside other work. What
    stays when the work is done (KV, features) is not transient.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._rates: dict[Work, deque[float]] = {
            "encode": deque(maxlen=_LAST),
            "prefill": deque(maxlen=_LAST),
        }
        """Bytes per token."""
        self._begun: dict[Work, tuple[int, int]] = {}
        """By kind of work under way: active bytes when it began, and the most since."""
        self._overlapping: set[Work] = set()
        """Kinds under way that did not run alone."""
        self._peak_bytes = 0
        self.feature_bytes = 0
        """Bytes of features per media token: the most that was seen."""

    @property
    def peak_bytes(self) -> int:
        """The most bytes that arrays ever held."""
        self._fold()
        return self._peak_bytes

    def of(self, work: Work, num_tokens: int) -> int:
        """Transient bytes of work on `num_tokens`, at most.

        Proportional to the tokens: the fixed part makes it an overestimate for more tokens than
        were seen, and attention, which grows with the square, is computed in bounded blocks.
        """
        rates = self._rates[work]
        return int(max(rates, default=_COLD_BYTES[work]) * num_tokens)

    def begin(self, work: Work) -> None:
        """Work of this kind begins; `end` follows, once."""
        self._fold()
        active = self._memory.read().active_bytes
        self._begun[work] = (active, active)
        if len(self._begun) > 1:
            self._overlapping.update(self._begun)

    def end(self, work: Work, num_tokens: int, *, is_typical: bool = True) -> None:
        """Learn from the peak of the work of this kind that was begun, if it `is_typical`."""
        self._fold()
        before, peak = self._begun.pop(work)
        is_alone = work not in self._overlapping
        self._overlapping.discard(work)
        if is_alone and is_typical and num_tokens >= _LEAST_TOKENS:
            stays = max(before, self._memory.read().active_bytes)
            self._rates[work].append(max(0, peak - stays) / num_tokens)

    def _fold(self) -> None:
        """Add the peak since the last call to the peaks of all work under way."""
        peak = self._memory.read_peak()
        self._peak_bytes = max(self._peak_bytes, peak)
        self._begun = {
            work: (active, max(most, peak)) for work, (active, most) in self._begun.items()
        }
