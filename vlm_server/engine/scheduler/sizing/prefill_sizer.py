"""The prompts of a batched prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vlm_server.engine.scheduler.sizing.call_times import AS_LONG_AS_ONE, CallTimes, power_of_two

_LAST_PREFILLS = 500


class _Prefill(NamedTuple):
    """Prefills of `num_prompts` whole prompts; the longest fits into the power of two `size`.

    others_decode: whether the prompts joined running sequences, which takes time, too.
    """

    size: int
    num_prompts: int
    others_decode: bool


class PrefillSizer:
    """Sizes batched prefills so that the first prompt's token comes no later than if it were alone.

    Where launching kernels takes most of a short chunk's time, as on a large GPU, several prompts
    take about as long as one; elsewhere, as on a CPU, each takes its own time.
    """

    def __init__(self) -> None:
        self._times = CallTimes[_Prefill](_LAST_PREFILLS)

    def record(
        self, num_tokens: int, num_prompts: int, seconds: float, *, others_decode: bool
    ) -> None:
        """Record the time of one call with `num_prompts`, the longest of `num_tokens`."""
        kind = _Prefill(power_of_two(num_tokens), num_prompts, others_decode)
        self._times.record(kind, seconds)

    def choose_num_prompts(
        self, longest: Sequence[int], max_seconds: float, *, others_decode: bool
    ) -> int:
        """The number of waiting prompts to prefill in the next call.

        longest: for each number of prompts, from 1 on, the tokens of the longest. The number is
        doubled while that was measured to take as long as one prompt. An unmeasured number is
        tried with prompts of one size, if it would take at most `max_seconds` without any gain.
        """
        times = self._times
        kind = first_kind = _Prefill(power_of_two(longest[0]), 1, others_decode)
        in_time = min(AS_LONG_AS_ONE * times.best(first_kind), max_seconds)
        while 2 * kind.num_prompts <= len(longest) and times.is_measured(kind):
            num_prompts = 2 * kind.num_prompts
            size = power_of_two(longest[num_prompts - 1])
            doubled = _Prefill(size, num_prompts, others_decode)
            if times.is_measured(doubled):
                is_in_time = times.best(doubled) <= in_time
            else:
                may_try = size == first_kind.size and not self._is_hopeless(doubled)
                is_in_time = may_try and 2 * times.best(kind) <= max_seconds
            if not is_in_time:
                break
            kind = doubled
        return kind.num_prompts

    def _is_hopeless(self, kind: _Prefill) -> bool:
        """Whether the same number of shorter prompts takes much longer than one prompt."""
        return any(
            measured_kind.size < kind.size
            and measured_kind[1:] == kind[1:]
            and self._is_long(measured_kind)
            for measured_kind in self._times.kinds()
        )

    def _is_long(self, kind: _Prefill) -> bool:
        """Whether these prompts were measured to take much longer than one."""
        alone = self._times.best(kind._replace(num_prompts=1))
        return self._times.is_measured(kind) and self._times.best(kind) > AS_LONG_AS_ONE * alone
