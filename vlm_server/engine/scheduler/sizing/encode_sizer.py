"""The images of an encode."""

from __future__ import annotations

from typing import NamedTuple

from vlm_server.engine.scheduler.sizing.call_times import AS_LONG_AS_ONE, CallTimes, power_of_two

_LAST_ENCODES = 64
_WORTH_DOUBLING = 0.95
"""The number of images per call is doubled only if that lowers the time of each to this share."""
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
        kind = _Encode(power_of_two(num_tokens), num_images)
        self._times.record(kind, seconds / (num_tokens * num_images))

    def choose_num_images(self, num_tokens: int, num_waiting: int, max_seconds: float) -> int:
        """The number of `num_waiting` images of `num_tokens` each to encode in the next call.

        It is doubled while that was measured to pay. An unmeasured number is tried if it would
        take at most `max_seconds` even without any gain.
        """
        kind = _Encode(power_of_two(num_tokens), 1)
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
        single, pair = (_Encode(power_of_two(num_tokens), number) for number in (1, 2))
        if not self._times.is_measured(pair):
            return True  # try it
        return 2 * self._times.best(pair) <= AS_LONG_AS_ONE * self._times.best(single)
