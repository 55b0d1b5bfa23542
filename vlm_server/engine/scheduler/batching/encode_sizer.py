"""How many pictures of one size are encoded in one call, learned from measured encodes.

A device that one picture does not fill takes two in less than twice the time; another one, such as
a CPU, gains nothing. What decides is seconds per token, of pictures of about one size, and of the
last few the best: an encode is slow now and then for another reason. Old measurements are
forgotten, and what did not pay is tried again.
"""

from __future__ import annotations

from collections import deque

_LAST_ENCODES = 64
_LAST_OF_A_SIZE = 3
_TRIALS = 2
"""The first time is no measure: kernels are compiled, attention is planned."""
_WORTH_DOUBLING = 0.95
"""Twice as many are encoded at once only if each takes less than this share of its time."""
_AS_LONG_AS_ONE = 1.1
"""Two pictures that take at most so many times as long as one of them."""
_MOST_TOKENS_OF_TWO = 256
"""Larger pictures fill a device by themselves: four of 1,150 tokens take an H200 2.6 times as long
as one. Trying two costs it 0.3 s, since attention is planned for two."""

_Key = tuple[int, int]
"""(the power of two that a picture's tokens fit into, how many pictures)."""


class EncodeSizer:
    """Chooses among powers of two: some backends plan again for each new shape."""

    def __init__(self, most: int) -> None:
        """`most`: pictures in one call; 1 if none is to be encoded with another."""
        self._most = most
        self._last: deque[tuple[_Key, float]] = deque(maxlen=_LAST_ENCODES)
        """With seconds per token."""

    def note(self, num_tokens: int, count: int, seconds: float) -> None:
        """`count` pictures of `num_tokens` each took `seconds` together."""
        self._last.append((_key(num_tokens, count), seconds / (num_tokens * count)))

    def at_once(self, num_tokens: int, waiting: int, max_seconds: float) -> int:
        """How many of `waiting` pictures of `num_tokens` each to encode now.

        Twice as many as was found to pay are tried, if even without any gain they would take no
        longer than `max_seconds`.
        """
        count, measured = 1, self._rates(num_tokens, 1)
        while 2 * count <= min(waiting, self._most) and len(measured) >= _TRIALS:
            each = min(measured)
            measured = self._rates(num_tokens, 2 * count)
            does_not_pay = len(measured) >= _TRIALS and min(measured) > _WORTH_DOUBLING * each
            expected = min([each, *measured]) * 2 * count * num_tokens
            if does_not_pay or expected > max_seconds:
                break
            count *= 2
        return count

    def two_are_as_one(self, num_tokens: int, max_seconds: float) -> bool:
        """Whether two take about as long as one; also true when that is tried."""
        if num_tokens > _MOST_TOKENS_OF_TWO or self.at_once(num_tokens, 2, max_seconds) < 2:
            return False
        one, two = self._rates(num_tokens, 1), self._rates(num_tokens, 2)
        return len(two) < _TRIALS or 2 * min(two) <= _AS_LONG_AS_ONE * min(one)

    def _rates(self, num_tokens: int, count: int) -> list[float]:
        """Seconds per token of the last encodes of so many pictures of about that size."""
        key = _key(num_tokens, count)
        return [rate for one, rate in self._last if one == key][-_LAST_OF_A_SIZE:]


def _key(num_tokens: int, count: int) -> _Key:
    return max(0, num_tokens - 1).bit_length(), count
