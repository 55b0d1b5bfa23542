"""Sizes of device calls (tokens, images, prompts), learned from measured times.

All sizes are powers of two, since some backends compile for each new shape. The width of drafts is
chosen by the runner as it launches a step (`runner/decode/speculation`): gains of a few percent
show in running means, not in the best of a few times.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from vlm_server.interfaces import PreparedPrompt

MAX_IDLE_BATCH_SECONDS = 0.25
"""The maximum time of a batch while no sequence decodes, since a new request waits for it. While
sequences decode, the limit of batches and chunks is `max_step_seconds`."""
_MAX_IDLE_CHUNK_SECONDS = 1.0
"""The maximum time of a chunk while no sequence decodes: Metal ends kernels that delay the screen.
Longer than a batch's: larger chunks take less time per token on every device, while batches gain
only on one that a single image or prompt does not fill."""

_NUM_TIMES = 3
_MIN_TIMES = 2
"""The number of calls to go by: the first of a kind may compile kernels and schedule attention."""

Kind = TypeVar("Kind", bound=Hashable)
"""A class of calls that are assumed to take equally long."""


class CallTimes(Generic[Kind]):
    """The times of the last three calls of each kind.

    The best of the three counts, since a call may be slow for another reason. Old times are
    dropped, so that a kind that was slow is tried again.
    """

    def __init__(self, max_age: int) -> None:
        """max_age: the number of later calls, of any kind, after which a time is dropped."""
        self._max_age = max_age
        self._num_calls = 0
        self._last: dict[Kind, deque[tuple[int, float]]] = {}
        """The call's number and seconds, by kind."""

    def record(self, kind: Kind, seconds: float) -> None:
        """Record the time of a call, or its time per token; infinite for a failed call."""
        self._num_calls += 1
        last_times = self._last.setdefault(kind, deque(maxlen=_NUM_TIMES))
        last_times.append((self._num_calls, seconds))

    def kinds(self) -> list[Kind]:
        """The kinds with a known time."""
        return [kind for kind in self._last if self._times(kind)]

    def is_measured(self, kind: Kind) -> bool:
        """Whether enough times of this kind are known."""
        return len(self._times(kind)) >= _MIN_TIMES

    def best(self, kind: Kind) -> float:
        """The shortest known time; infinite if there is none."""
        return min(self._times(kind), default=math.inf)

    def _times(self, kind: Kind) -> list[float]:
        since = self._num_calls - self._max_age
        return [seconds for number, seconds in self._last.get(kind, ()) if number > since]


# ---- tokens of a chunk -----------------------------------------------------------------------

_FIRST_TOKENS = 128
"""The size of a chunk before any measurement."""
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

    def __init__(self, max_step_seconds: float, max_chunk_tokens: int) -> None:
        self._max_step_seconds = max_step_seconds
        self._max_chunk_tokens = max_chunk_tokens
        self._allowed_tokens = max_chunk_tokens
        """The maximum size at present: lowered when a chunk is too much for the device."""
        self._num_since_failure = 0
        """The number of chunks since the last failure."""
        self._times = CallTimes[int](_LAST_CHUNKS)
        """The times of the last chunks, by the size that `chunk_tokens` chose."""

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
        self._allowed_tokens = max(1, min(self._allowed_tokens, _power_of_two(num_tokens) // 2))
        self._num_since_failure = 0

    def chunk_end(
        self, prompt: PreparedPrompt, start: int, *, piggyback_tokens: int, others_decode: bool
    ) -> int:
        """The end of the chunk of `prompt` that begins at token `start`.

        Its size is that of a mixed step, `piggyback_tokens`, or `chunk_tokens` if there is none. It
        ends at the next of `chunk_ends` before that, but never inside `atomic_prefill_tokens`.
        """
        num_left = prompt.num_tokens - start
        size = min(piggyback_tokens, self._max_chunk_tokens)
        if not size:
            size = self.chunk_tokens(num_left, start, others_decode=others_decode)
        end = start + min(num_left, size)
        later_ends = prompt.chunk_ends[bisect_right(prompt.chunk_ends, start) :]
        return max(prompt.atomic_prefill_tokens, min([end, *later_ends[:1]]))

    def chunk_tokens(self, num_left: int, num_before: int = 0, *, others_decode: bool) -> int:
        """The size, at least one, of a chunk that is not piggybacked; `num_left` tokens remain."""
        max_seconds = self._max_step_seconds if others_decode else _MAX_IDLE_CHUNK_SECONDS
        size = _FIRST_TOKENS
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
        size = _power_of_two(self._max_chunk_tokens + 1) // 2
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


def _size_of(num_tokens: int) -> int:
    """The smallest size class that holds a chunk of `num_tokens`, with its remainder."""
    size = _power_of_two(num_tokens)
    return size // 2 if 1 < num_tokens <= _MAX_LAST_CHUNK * size / 2 else size


def _power_of_two(num_tokens: int) -> int:
    return 1 << max(0, num_tokens - 1).bit_length()


# ---- images of an encode ---------------------------------------------------------------------

_LAST_ENCODES = 64
_WORTH_DOUBLING = 0.95
"""The number of images per call is doubled only if that lowers the time of each to this share."""
_AS_LONG_AS_ONE = 1.1
"""A batch takes as long as one image or prompt if its time is at most this multiple."""
_MAX_PAIRED_TOKENS = 256
"""The maximum size of images of two requests in one call: larger ones fill a device by themselves.
Four of 1,150 tokens take an H200 2.6 times as long as one, and a trial with two costs it 0.3 s."""


class _Encode(NamedTuple):
    """Encodes of `num_images`, whose tokens fit into the power of two `size`."""

    size: int
    num_images: int


class EncodeSizer:
    """Sizes encodes so that an image takes the least time.

    A device that one image does not fill encodes two in less than twice the time; on others, such
    as a CPU, batches gain nothing. Times are kept per token.
    """

    def __init__(self, max_images: int) -> None:
        """`max_images`: the maximum number of images in one call."""
        self._max_images = max_images
        self._times = CallTimes[_Encode](_LAST_ENCODES)

    def record(self, num_tokens: int, num_images: int, seconds: float) -> None:
        """Record the time of one call with `num_images` of `num_tokens` each."""
        kind = _Encode(_power_of_two(num_tokens), num_images)
        self._times.record(kind, seconds / (num_tokens * num_images))

    def choose_num_images(self, num_tokens: int, num_waiting: int, max_seconds: float) -> int:
        """The number of `num_waiting` images of `num_tokens` each to encode in the next call.

        It is doubled while that was measured to pay. An unmeasured number is tried if it would
        take at most `max_seconds` even without any gain.
        """
        kind = _Encode(_power_of_two(num_tokens), 1)
        while 2 * kind.num_images <= min(num_waiting, self._max_images):
            doubled = kind._replace(num_images=2 * kind.num_images)
            seconds, doubled_seconds = self._times.best(kind), self._times.best(doubled)
            pays = doubled_seconds <= _WORTH_DOUBLING * seconds
            may_pay = pays or not self._times.is_measured(doubled)
            expected_seconds = min(seconds, doubled_seconds) * doubled.num_images * num_tokens
            if not (self._times.is_measured(kind) and may_pay and expected_seconds <= max_seconds):
                break
            kind = doubled
        return kind.num_images

    def may_pair(self, num_tokens: int, max_seconds: float) -> bool:
        """Whether to encode two images in one call, which then takes about as long as one.

        True for a trial, too.
        """
        can_try = self.choose_num_images(num_tokens, 2, max_seconds) == 2
        if num_tokens > _MAX_PAIRED_TOKENS or not can_try:
            return False
        single, pair = (_Encode(_power_of_two(num_tokens), number) for number in (1, 2))
        if not self._times.is_measured(pair):
            return True  # try it
        return 2 * self._times.best(pair) <= _AS_LONG_AS_ONE * self._times.best(single)


# ---- prompts of a batched prefill ------------------------------------------------------------

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
        kind = _Prefill(_power_of_two(num_tokens), num_prompts, others_decode)
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
        kind = first_kind = _Prefill(_power_of_two(longest[0]), 1, others_decode)
        in_time = min(_AS_LONG_AS_ONE * times.best(first_kind), max_seconds)
        while 2 * kind.num_prompts <= len(longest) and times.is_measured(kind):
            num_prompts = 2 * kind.num_prompts
            size = _power_of_two(longest[num_prompts - 1])
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
        return self._times.is_measured(kind) and self._times.best(kind) > _AS_LONG_AS_ONE * alone
