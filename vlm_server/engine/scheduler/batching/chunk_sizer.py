"""How many prompt tokens fit into a step's time, learned from measured chunks.

Chunks have few sizes, powers of two: some backends plan again for each new shape. A chunk takes a
fixed time plus a time per token, and now and then it is slow for another reason (a kernel is
compiled, a picture is encoded beside it). So a size is judged by the best of its last chunks, and
by what smaller ones take. Old measurements are forgotten, and the size is tried again.
"""

from __future__ import annotations

from collections import deque

_FIRST_TOKENS = 128
"""While nothing is measured."""
_LEAST_TOKENS = 16
_LAST_CHUNKS = 16
_LAST_OF_A_SIZE = 3
_WORTH_HALVING = 0.75
"""A chunk is halved only if half of it takes less than this share of its time."""
_WITH_ITS_REST = 1.25
"""A chunk may be this much larger if that leaves nothing for another one."""
_ALONE_SECONDS = 1.0
"""Of a chunk while nobody decodes: a request that comes meanwhile waits for it, and Metal ends
what keeps the screen waiting."""
_DOUBLING_TOKENS = 32768
"""A chunk after so many tokens takes about twice as long as a prompt's first, with models of two to
eight billion parameters."""


class ChunkSizer:
    """Sizes prefill chunks so that decoding sequences wait no longer than a step may take.

    Times are kept as those of a prompt's first tokens.
    """

    def __init__(self, max_step_seconds: float, max_chunk_tokens: int) -> None:
        self._max_step_seconds = max_step_seconds
        self._max_chunk_tokens = max_chunk_tokens
        self._most_tokens = max_chunk_tokens
        """As long as larger chunks are too much for the device."""
        self._num_since_failure = 0
        """Chunks."""
        self._last: deque[tuple[int, float]] = deque(maxlen=_LAST_CHUNKS)
        """(size, seconds) of the last chunks, by the size that `chunk_tokens` chose."""
        self._seconds: dict[int, list[float]] = {}
        """Those seconds, by size."""

    def note(self, num_tokens: int, seconds: float, num_before: int = 0) -> None:
        """A chunk of `num_tokens` after `num_before` others of its prompt took `seconds`.

        Larger ones than allowed, atomic, are ignored.
        """
        if num_tokens > self._max_chunk_tokens:
            return
        self._num_since_failure += 1
        if self._num_since_failure % _LAST_CHUNKS == 0:
            self._most_tokens = min(2 * self._most_tokens, self._max_chunk_tokens)
        self._last.append((_size_of(num_tokens), seconds / _growth(num_before)))
        by_size: dict[int, list[float]] = {}
        for size, each in self._last:
            by_size[size] = [*by_size.get(size, []), each][-_LAST_OF_A_SIZE:]
        self._seconds = by_size

    def note_failure(self, num_tokens: int) -> None:
        """A chunk was too much for the device: halve it, and try larger ones again much later."""
        self._most_tokens = max(1, min(self._most_tokens, _power_of_two(num_tokens) // 2))
        self._num_since_failure = 0

    def chunk_tokens(self, num_left: int, num_before: int = 0, *, others_decode: bool) -> int:
        """Tokens of the next chunk of a prompt that has `num_left`; at least one."""
        most_seconds = self._max_step_seconds if others_decode else _ALONE_SECONDS
        size = _FIRST_TOKENS
        if self._seconds:
            size = self._fitting(most_seconds / _growth(num_before))
        if not others_decode and 2 * size > self._max_chunk_tokens:
            size = self._max_chunk_tokens
        size = min(size, self._most_tokens)
        if num_left <= min(_WITH_ITS_REST * size, self._most_tokens):
            return num_left
        return size

    def _fitting(self, most_seconds: float) -> int:
        """The largest size that fits, or one below which chunks would not take much less."""
        size = _power_of_two(self._max_chunk_tokens + 1) // 2
        least = max(_LEAST_TOKENS, min(self._seconds) // 2)
        while size > least and self._expected(size) > most_seconds:
            if size // 2 in self._seconds and self._saves_little(size):
                break
            size //= 2
        return max(1, min(size, self._max_chunk_tokens))

    def _saves_little(self, size: int) -> bool:
        """Whether half a chunk, which was measured, takes about as long."""
        return self._expected(size // 2) > _WORTH_HALVING * self._expected(size)

    def _expected(self, size: int) -> float:
        """Seconds of a chunk of `size`: the best of its last; the first time is no measure."""
        own = self._seconds.get(size, [])
        if len(own) > 1:
            return min(own)
        return min([*own, self._extrapolated(size)])

    def _extrapolated(self, size: int) -> float:
        """On the line through the two next smaller sizes; a smaller one takes no longer.

        Of one size alone, half its time is taken for fixed, so that a larger one is tried.
        """
        smaller = sorted((s, min(t)) for s, t in self._seconds.items() if s < size)[-2:]
        if not smaller:
            return min(min(t) for t in self._seconds.values())
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
    """The least that is not below `num_tokens`."""
    return 1 << max(0, num_tokens - 1).bit_length()
