"""How many short prompts are prefilled in one call, learned from measured chunks.

Where launching kernels takes most of a short chunk, as on a large GPU, several prompts take about
as long as one; elsewhere, as on a CPU, each takes its own time. So they go together only if the
first one's token comes no later than if it were alone. A chunk is judged by the best of its last
times: it is slow now and then for another reason. What did not pay is tried again much later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_LAST_OF_A_KIND = 3
_TRIALS = 2
"""The first time is no measure: kernels are compiled, attention is planned."""
_AS_LONG_AS_ONE = 1.1
"""Several prompts may take at most so many times as long as the first of them alone."""
_TRIED_AGAIN_AFTER = 500
"""Chunks."""


class _Kind(NamedTuple):
    """Chunks that are taken to last equally long.

    size: the power of two that the tokens of the longest prompt fit into. others_decode: whether
    the prompts joined others, which takes time, too.
    """

    size: int
    num_prompts: int
    others_decode: bool


class _Chunk(NamedTuple):
    number: int
    seconds: float


class PrefillSizer:
    """Chooses among powers of two: some backends plan again for each new shape."""

    def __init__(self) -> None:
        self._last: dict[_Kind, deque[_Chunk]] = {}
        """Of each kind."""
        self._num_chunks = 0

    def note(self, num_tokens: int, count: int, seconds: float, *, others_decode: bool) -> None:
        """`count` whole prompts, the longest of `num_tokens`, took `seconds` to their answers."""
        self._num_chunks += 1
        kind = _Kind(_size_of(num_tokens), count, others_decode)
        last = self._last.setdefault(kind, deque(maxlen=_LAST_OF_A_KIND))
        last.append(_Chunk(self._num_chunks, seconds))

    def at_once(self, longest: Sequence[int], max_seconds: float, *, others_decode: bool) -> int:
        """How many of the prompts that wait to prefill now.

        longest: for each number of them, from 1 on, the tokens of the longest. Twice as many as
        were found to pay are tried, with prompts of one size, if even without any gain they would
        take no longer than `max_seconds`.
        """
        if len(longest) == 1:
            return 1
        first = _Kind(_size_of(longest[0]), 1, others_decode)
        count, measured = 1, self._seconds(first)
        in_time = min(_AS_LONG_AS_ONE * min(measured, default=0.0), max_seconds)
        while len(measured) >= _TRIALS and 2 * count <= len(longest):
            half = min(measured)
            kind = _Kind(_size_of(longest[2 * count - 1]), 2 * count, others_decode)
            measured = self._seconds(kind)
            if len(measured) >= _TRIALS:
                is_in_time = min(measured) <= in_time
            else:
                may_try = kind.size == first.size and not self._is_hopeless(kind)
                is_in_time = may_try and 2 * half <= max_seconds
            if not is_in_time:
                break
            count *= 2
        return count

    def _is_hopeless(self, kind: _Kind) -> bool:
        """Whether as many shorter prompts take much longer than one: longer ones do, too."""
        return any(
            other.size < kind.size and other[1:] == kind[1:] and self._is_long(other)
            for other in self._last
        )

    def _is_long(self, kind: _Kind) -> bool:
        """Whether several prompts were found to take much longer than one."""
        several, alone = self._seconds(kind), self._seconds(kind._replace(num_prompts=1))
        known = len(several) >= _TRIALS and bool(alone)
        return known and min(several) > _AS_LONG_AS_ONE * min(alone)

    def _seconds(self, kind: _Kind) -> list[float]:
        """Of the last chunks of that kind; of several prompts, what is not too long ago."""
        since = 0 if kind.num_prompts == 1 else self._num_chunks - _TRIED_AGAIN_AFTER
        return [one.seconds for one in self._last.get(kind, ()) if one.number > since]


def _size_of(num_tokens: int) -> int:
    return max(0, num_tokens - 1).bit_length()
