"""How much goes into one call of the device (tokens, images, prompts), learned from measured times.

All sizes are powers of two, since some backends plan again for each new shape. The width of drafts
is chosen by the runner, as a step is launched (`runner/text/speculation`): its gains of a few
percent are told by running means, and not by the best of a few times.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

_LAST_OF_A_KIND = 3
_TRIALS = 2
"""The first call of a kind is no measure: kernels are compiled, attention is planned."""

Kind = TypeVar("Kind", bound=Hashable)
"""Calls that are taken to last equally long."""


class CallTimes(Generic[Kind]):
    """The times of the last three calls of each kind.

    A call is slow now and then for another reason, so the best of the three counts. Times of calls
    of long ago are forgotten, so that what was slow then is tried again.
    """

    def __init__(self, max_age: int) -> None:
        """max_age: how many calls, of any kind, a time is kept for."""
        self._max_age = max_age
        self._num_calls = 0
        self._last: dict[Kind, deque[tuple[int, float]]] = {}
        """(number of the call, seconds), by kind."""

    def record(self, kind: Kind, seconds: float) -> None:
        """A call of this kind took `seconds`, or as many for each token, or an infinite time."""
        self._num_calls += 1
        last = self._last.setdefault(kind, deque(maxlen=_LAST_OF_A_KIND))
        last.append((self._num_calls, seconds))

    def kinds(self) -> list[Kind]:
        """The kinds of which any time is known."""
        return [kind for kind in self._last if self._times(kind)]

    def is_measured(self, kind: Kind) -> bool:
        """Whether there are enough times of this kind to go by."""
        return len(self._times(kind)) >= _TRIALS

    def best(self, kind: Kind) -> float:
        """The shortest of the last times; infinite if there are none."""
        return min(self._times(kind), default=math.inf)

    def _times(self, kind: Kind) -> list[float]:
        since = self._num_calls - self._max_age
        return [seconds for number, seconds in self._last.get(kind, ()) if number > since]


# ---- tokens of a chunk -----------------------------------------------------------------------

_FIRST_TOKENS = 128
"""While nothing is measured."""
_LEAST_TOKENS = 16
_LAST_CHUNKS = 16
_WORTH_HALVING = 0.75
"""A chunk is halved only if half of it takes less than this share of its time."""
_WITH_ITS_REST = 1.25
"""A chunk may be this much larger if that leaves nothing for another one."""
_ALONE_SECONDS = 1.0
"""Of a chunk while no sequence decodes: a request that comes meanwhile waits for it, and Metal ends
what keeps the screen waiting."""
_DOUBLING_TOKENS = 32768
"""A chunk after so many tokens takes about twice as long as a prompt's first, with models of two to
eight billion parameters."""


class ChunkSizer:
    """Sizes prefill chunks so that decoding sequences wait no longer than a step may take.

    A chunk takes a fixed time plus a time per token, so a size is also judged by what smaller ones
    take. Times are kept as those of a prompt's first tokens.
    """

    def __init__(self, max_step_seconds: float, max_chunk_tokens: int) -> None:
        self._max_step_seconds = max_step_seconds
        self._max_chunk_tokens = max_chunk_tokens
        self._most_tokens = max_chunk_tokens
        """Fewer while larger chunks are too much for the device."""
        self._num_since_failure = 0
        """Chunks."""
        self._times = CallTimes[int](_LAST_CHUNKS)
        """Of the last chunks, by the size that `chunk_tokens` chose."""

    def record(self, num_tokens: int, seconds: float, num_before: int = 0) -> None:
        """A chunk of `num_tokens` after `num_before` others of its prompt took `seconds`.

        Larger chunks than allowed, atomic, are ignored.
        """
        if num_tokens > self._max_chunk_tokens:
            return
        self._num_since_failure += 1
        if self._num_since_failure % _LAST_CHUNKS == 0:
            self._most_tokens = min(2 * self._most_tokens, self._max_chunk_tokens)
        self._times.record(_size_of(num_tokens), seconds / _growth(num_before))

    def record_failure(self, num_tokens: int) -> None:
        """A chunk was too much for the device: halve it, and try larger ones again much later."""
        self._most_tokens = max(1, min(self._most_tokens, _power_of_two(num_tokens) // 2))
        self._num_since_failure = 0

    def chunk_tokens(self, num_left: int, num_before: int = 0, *, others_decode: bool) -> int:
        """Tokens of the next chunk of a prompt that has `num_left`; at least one."""
        most_seconds = self._max_step_seconds if others_decode else _ALONE_SECONDS
        size = _FIRST_TOKENS
        if measured := self._times.kinds():
            size = self._fitting(measured, most_seconds / _growth(num_before))
        if not others_decode and 2 * size > self._max_chunk_tokens:
            size = self._max_chunk_tokens
        size = min(size, self._most_tokens)
        if num_left <= min(_WITH_ITS_REST * size, self._most_tokens):
            return num_left
        return size

    def _fitting(self, measured: Sequence[int], most_seconds: float) -> int:
        """The largest size that fits, or one below which chunks would not take much less."""
        size = _power_of_two(self._max_chunk_tokens + 1) // 2
        least = max(_LEAST_TOKENS, min(measured) // 2)
        while size > least and self._expected(size) > most_seconds:
            if size // 2 in measured and self._saves_little(size):
                break
            size //= 2
        return max(1, min(size, self._max_chunk_tokens))

    def _saves_little(self, size: int) -> bool:
        """Whether half a chunk, which was measured, takes about as long."""
        return self._expected(size // 2) > _WORTH_HALVING * self._expected(size)

    def _expected(self, size: int) -> float:
        best = self._times.best(size)
        return best if self._times.is_measured(size) else min(best, self._extrapolated(size))

    def _extrapolated(self, size: int) -> float:
        """Seconds on the line through the two next smaller sizes; a smaller one takes no longer.

        Of one size alone, half its time is taken for fixed, so that a larger one is tried.
        """
        measured = {each: self._times.best(each) for each in sorted(self._times.kinds())}
        smaller = [(each, seconds) for each, seconds in measured.items() if each < size][-2:]
        if not smaller:
            return min(measured.values())
        large, slow = smaller[-1]
        small, fast = smaller[0] if len(smaller) == 2 else (0, slow / 2)
        return slow + max(0.0, slow - fast) / (large - small) * (size - large)


def _growth(num_before: int) -> float:
    """How much longer a chunk takes after so many tokens: it attends to all of them."""
    return 1 + num_before / _DOUBLING_TOKENS


def _size_of(num_tokens: int) -> int:
    """The smallest size class that holds a chunk of `num_tokens`, with its remainder."""
    size = _power_of_two(num_tokens)
    return size // 2 if 1 < num_tokens <= _WITH_ITS_REST * size / 2 else size


def _power_of_two(num_tokens: int) -> int:
    return 1 << max(0, num_tokens - 1).bit_length()


# ---- images of an encode ---------------------------------------------------------------------

_LAST_ENCODES = 64
_WORTH_DOUBLING = 0.95
"""Twice as many are encoded at once only if each takes less than this share of its time."""
_AS_LONG_AS_ONE = 1.1
"""Several images, or prompts, that take at most so many times as long as one of them."""
_MOST_TOKENS_OF_TWO = 256
"""Larger images fill a device by themselves: four of 1,150 tokens take an H200 2.6 times as long
as one. Trying two costs it 0.3 s, since attention is planned for two."""


class _Encode(NamedTuple):
    """Encodes of `num_images`, whose tokens fit into the power of two `size`."""

    size: int
    num_images: int


class EncodeSizer:
    """Sizes encodes so that an image takes the least time.

    A device that one image does not fill takes two in less than twice the time; another one, such
    as a CPU, gains nothing. Times are kept per token.
    """

    def __init__(self, most: int) -> None:
        """`most`: images in one call; 1 if none is to be encoded with another."""
        self._most = most
        self._times = CallTimes[_Encode](_LAST_ENCODES)

    def record(self, num_tokens: int, count: int, seconds: float) -> None:
        """`count` images of `num_tokens` each took `seconds` together."""
        kind = _Encode(_power_of_two(num_tokens), count)
        self._times.record(kind, seconds / (num_tokens * count))

    def at_once(self, num_tokens: int, waiting: int, max_seconds: float) -> int:
        """How many of `waiting` images of `num_tokens` each to encode now.

        Twice as many as was found to pay are tried, if even without any gain they would take no
        longer than `max_seconds`.
        """
        one = _Encode(_power_of_two(num_tokens), 1)
        while 2 * one.num_images <= min(waiting, self._most) and self._times.is_measured(one):
            two = one._replace(num_images=2 * one.num_images)
            each, with_others = self._times.best(one), self._times.best(two)
            does_not_pay = self._times.is_measured(two) and with_others > _WORTH_DOUBLING * each
            expected = min(each, with_others) * two.num_images * num_tokens
            if does_not_pay or expected > max_seconds:
                break
            one = two
        return one.num_images

    def two_are_as_one(self, num_tokens: int, max_seconds: float) -> bool:
        """Whether two take about as long as one; also true when that is tried."""
        if num_tokens > _MOST_TOKENS_OF_TWO or self.at_once(num_tokens, 2, max_seconds) < 2:
            return False
        one, two = (_Encode(_power_of_two(num_tokens), number) for number in (1, 2))
        is_long = 2 * self._times.best(two) > _AS_LONG_AS_ONE * self._times.best(one)
        return not (self._times.is_measured(two) and is_long)


# ---- prompts of a batched prefill ------------------------------------------------------------

_LAST_PREFILLS = 500


class _Prefill(NamedTuple):
    """Prefills of `num_prompts` whole prompts; the longest fits into the power of two `size`.

    others_decode: whether the prompts joined others, which takes time, too.
    """

    size: int
    num_prompts: int
    others_decode: bool


class PrefillSizer:
    """Sizes batched prefills so that the first prompt's token comes no later than if it were alone.

    Where launching kernels takes most of a short chunk, as on a large GPU, several prompts take
    about as long as one; elsewhere, as on a CPU, each takes its own time.
    """

    def __init__(self) -> None:
        self._times = CallTimes[_Prefill](_LAST_PREFILLS)

    def record(self, num_tokens: int, count: int, seconds: float, *, others_decode: bool) -> None:
        """`count` whole prompts, the longest of `num_tokens`, took `seconds` to their answers."""
        self._times.record(_Prefill(_power_of_two(num_tokens), count, others_decode), seconds)

    def at_once(self, longest: Sequence[int], max_seconds: float, *, others_decode: bool) -> int:
        """How many of the prompts that wait to prefill now.

        longest: for each number of them, from 1 on, the tokens of the longest. Twice as many as
        were found to pay are tried, with prompts of one size, if even without any gain they would
        take no longer than `max_seconds`.
        """
        times = self._times
        one = first = _Prefill(_power_of_two(longest[0]), 1, others_decode)
        in_time = min(_AS_LONG_AS_ONE * times.best(first), max_seconds)
        while 2 * one.num_prompts <= len(longest) and times.is_measured(one):
            two = _Prefill(
                _power_of_two(longest[2 * one.num_prompts - 1]), 2 * one.num_prompts, others_decode
            )
            if times.is_measured(two):
                is_in_time = times.best(two) <= in_time
            else:
                may_try = two.size == first.size and not self._is_hopeless(two)
                is_in_time = may_try and 2 * times.best(one) <= max_seconds
            if not is_in_time:
                break
            one = two
        return one.num_prompts

    def _is_hopeless(self, kind: _Prefill) -> bool:
        """Whether as many shorter prompts take much longer than one: longer ones do, too."""
        return any(
            other.size < kind.size and other[1:] == kind[1:] and self._is_long(other)
            for other in self._times.kinds()
        )

    def _is_long(self, kind: _Prefill) -> bool:
        """Whether several prompts were found to take much longer than one."""
        alone = self._times.best(kind._replace(num_prompts=1))
        return self._times.is_measured(kind) and self._times.best(kind) > _AS_LONG_AS_ONE * alone
