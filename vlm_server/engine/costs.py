"""What work takes of device memory while it runs, learned from peaks. Knows tokens and bytes."""

from __future__ import annotations

from collections import deque
from typing import Literal

from vlm_server.ports import DeviceMemory

Work = Literal["encode", "prefill"]

_COLD_BYTES = {"encode": 4 << 20, "prefill": 1 << 20}
"""Of a token, before anything was measured: more than any model needs that fits one machine."""
_LAST = 32
_LEAST_TOKENS = 16
"""Of fewer, what is fixed would pass for what each token takes."""


class Costs:
    """The most that a token took in the last pieces of work of each kind.

    Peaks belong to the process, so what runs beside a piece of work is counted with it: it is
    rather too much than too little.
    """

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._rates: dict[Work, deque[float]] = {
            "encode": deque(maxlen=_LAST),
            "prefill": deque(maxlen=_LAST),
        }
        """Bytes of a token."""
        self._begun: dict[Work, tuple[int, int]] = {}
        """By kind of work under way: active bytes when it began, and the most since."""
        self._peak_bytes = 0

    @property
    def peak_bytes(self) -> int:
        """The most that was ever held."""
        self._fold()
        return self._peak_bytes

    def of(self, work: Work, num_tokens: int) -> int:
        """Bytes that so many tokens take at most while they are worked on.

        In proportion: what is fixed makes it too much for more tokens than were seen, and
        attention, which grows with the square, is worked on in bounded pieces.
        """
        rates = self._rates[work]
        return int(max(rates, default=_COLD_BYTES[work]) * num_tokens)

    def begin(self, work: Work) -> None:
        self._fold()
        active = self._memory.read().active_bytes
        self._begun[work] = (active, active)

    def end(self, work: Work, num_tokens: int) -> None:
        """The work that was begun last of its kind is done."""
        self._fold()
        active, peak = self._begun.pop(work)
        if num_tokens >= _LEAST_TOKENS:
            self._rates[work].append((peak - active) / num_tokens)

    def _fold(self) -> None:
        """Take the peak since the last time into all that is under way."""
        peak = self._memory.take_peak()
        self._peak_bytes = max(self._peak_bytes, peak)
        self._begun = {
            work: (active, max(most, peak)) for work, (active, most) in self._begun.items()
        }
