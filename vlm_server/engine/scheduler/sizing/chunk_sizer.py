"""The tokens of a prefill chunk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from vlm_server.engine.scheduler.sizing.call_times import CallTimes, power_of_two
from vlm_server.interfaces import PreparedPrompt
from vlm_server.interfaces.prompts import MAX_INNER_TOKENS

_MAX_IDLE_CHUNK_SECONDS = 1.0
"""The maximum time of a chunk while no sequence decodes: Metal ends kernels that delay the screen.
Longer than a batch's: larger chunks take less time per token on every device, while batches gain
only on one that a single image or prompt does not fill."""
_FIRST_TOKENS = 128
_MIN_TOKENS = 16
_LAST_CHUNKS = 16
_WORTH_HALVING = 0.75
"""A chunk is halved only if its half takes less than this share of its time."""
_MAX_LAST_CHUNK = 1.25
"""The maximum size of a prompt's last chunk, as a multiple of the others'."""
_DOUBLING_TOKENS = 32768
"""The number of earlier tokens that doubles a chunk's time, for models of two to eight billion
parameters."""


class ChunkSizer:
    """Sizes prefill chunks so that decoding sequences wait no longer than a step may take.

    A chunk takes a fixed time plus a time per token, so a size is also judged by the times of
    smaller ones. Times are normalized to those of a prompt's first chunk.
    """

    def __init__(
        self,
        max_step_seconds: float,
        max_chunk_tokens: int,
        first_tokens: int = _FIRST_TOKENS,
        *,
        max_inner_points: int = 0,
    ) -> None:
        """`first_tokens`: the size of a chunk before any measurement. `max_inner_points`: see
        `Backend`."""
        self._max_inner_points = max_inner_points
        self._max_step_seconds = max_step_seconds
        self._first_tokens = first_tokens
        self._max_chunk_tokens = max_chunk_tokens
        self._allowed_tokens = max_chunk_tokens
        """The maximum size at present: lowered when a chunk is too much for the device."""
        self._num_since_failure = 0
        """The number of chunks since the last failure."""
        self._times = CallTimes[int](_LAST_CHUNKS)
        """The times of the last chunks, by the size that `chunk_tokens` chose."""

    @property
    def allowed_tokens(self) -> int:
        """The maximum size at present: less than the setting's after a failure."""
        return self._allowed_tokens

    def record(self, num_tokens: int, seconds: float, num_before: int = 0) -> None:
        """Record the time of a chunk of `num_tokens` after `num_before` others of its prompt.

        Atomic chunks, which may exceed the maximum, are ignored.
        """
        if num_tokens > self._max_chunk_tokens:
            return
        self._num_since_failure += 1
        if self._num_since_failure % _LAST_CHUNKS == 0:
            self._allowed_tokens = min(2 * self._allowed_tokens, self._max_chunk_tokens)
        self._times.record(_size_of(num_tokens), seconds / _growth(num_before))

    def record_failure(self, num_tokens: int) -> None:
        """Halve the maximum size after a chunk that was too much; it is raised much later."""
        self._allowed_tokens = max(1, min(self._allowed_tokens, power_of_two(num_tokens) // 2))
        self._num_since_failure = 0

    def chunk_end(
        self, prompt: PreparedPrompt, start: int, *, piggyback_tokens: int, others_decode: bool
    ) -> int:
        """The end of the chunk of `prompt` that begins at token `start`.

        Its size is that of a mixed step, `piggyback_tokens`, or `chunk_tokens` if there is none. It
        ends at one of `chunk_ends` before that, unless it can keep the states there, but never
        inside `atomic_prefill_tokens`.
        """
        num_left = prompt.num_tokens - start
        size = min(piggyback_tokens, self._max_chunk_tokens)
        if not size:
            size = self.chunk_tokens(num_left, start, others_decode=others_decode)
        end = start + min(num_left, size)
        ends = [*prompt.points_inside(start, end), end]
        return max(prompt.atomic_prefill_tokens, _last_end(ends, self._max_inner_points))

    def chunk_tokens(self, num_left: int, num_before: int = 0, *, others_decode: bool) -> int:
        """The size, at least one, of a chunk that is not piggybacked; `num_left` tokens remain."""
        max_seconds = self._max_step_seconds if others_decode else _MAX_IDLE_CHUNK_SECONDS
        size = self._first_tokens
        if measured_sizes := self._times.kinds():
            size = self._largest_fitting(measured_sizes, max_seconds / _growth(num_before))
        if not others_decode and 2 * size > self._max_chunk_tokens:
            size = self._max_chunk_tokens
        size = min(size, self._allowed_tokens)
        if num_left <= min(_MAX_LAST_CHUNK * size, self._allowed_tokens):
            return num_left
        return size

    def _largest_fitting(self, measured_sizes: Sequence[int], max_seconds: float) -> int:
        """The largest size that takes at most `max_seconds`, or one whose half saves little."""
        size = power_of_two(self._max_chunk_tokens + 1) // 2
        min_size = max(_MIN_TOKENS, min(measured_sizes) // 2)
        while size > min_size and self._expected_seconds(size) > max_seconds:
            if size // 2 in measured_sizes and self._saves_little(size):
                break
            size //= 2
        return max(1, min(size, self._max_chunk_tokens))

    def _saves_little(self, size: int) -> bool:
        """Whether a chunk of half the size, which was measured, takes about as long."""
        return self._expected_seconds(size // 2) > _WORTH_HALVING * self._expected_seconds(size)

    def _expected_seconds(self, size: int) -> float:
        best = self._times.best(size)
        return best if self._times.is_measured(size) else min(best, self._extrapolate(size))

    def _extrapolate(self, size: int) -> float:
        """Seconds on the line through the two next smaller sizes; the minimum if there is none.

        With one smaller size, half its time is assumed to be fixed, so that a larger one is tried.
        """
        times = {kind: self._times.best(kind) for kind in sorted(self._times.kinds())}
        smaller = [(kind, seconds) for kind, seconds in times.items() if kind < size][-2:]
        if not smaller:
            return min(times.values())
        large, slow = smaller[-1]
        small, fast = smaller[0] if len(smaller) == 2 else (0, slow / 2)
        return slow + max(0.0, slow - fast) / (large - small) * (size - large)


def _growth(num_before: int) -> float:
    """The factor by which a chunk after `num_before` tokens takes longer: it attends to them."""
    return 1 + num_before / _DOUBLING_TOKENS


def _last_end(ends: Sequence[int], max_inner_points: int) -> int:
    """The last of the ascending `ends` that may have the ones before it inside its chunk."""
    last = 0
    for first, second in pairwise(ends[: max_inner_points + 1]):
        if second - first > MAX_INNER_TOKENS:
            break
        last += 1
    return ends[last]


def _size_of(num_tokens: int) -> int:
    """The smallest size class that holds a chunk of `num_tokens`, with its remainder."""
    size = power_of_two(num_tokens)
    return size // 2 if 1 < num_tokens <= _MAX_LAST_CHUNK * size / 2 else size
