"""Which moments of a video are shown. Knows times; knows no pixels."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

MIN_FRAMES = 4
"""Of a video that has so many: fewer would not show how something moves."""
_SAME_TIME_SECONDS = 1e-6


@dataclass(frozen=True, slots=True)
class Sample:
    """At `seconds` the frame numbered `index` is seen."""

    seconds: float
    index: int


def sample(
    times: Sequence[float], duration: float, fps: float, max_frames: int
) -> tuple[Sample, ...]:
    """Moments at equal distances from the first frame on, `fps` of them a second.

    `times` are the frames' own, in seconds, ascending from 0; `duration` holds the last frame's
    too. Time counts, not frames: one that is shown for long is sampled more than once. At most
    `max_frames`, and an even number, since models take frames in pairs; one for a still.
    """
    wanted = max(round(duration * fps), min(MIN_FRAMES, len(times)))
    count = min(wanted, max_frames)
    count -= count % 2
    if count < 2 or len(times) == 1:
        return (Sample(0.0, 0),)
    step = max(times[-1], duration - 1 / fps) / (count - 1)
    moments = [number * step for number in range(count)]
    return tuple(
        Sample(moment, max(bisect_right(times, moment + _SAME_TIME_SECONDS) - 1, 0))
        for moment in moments
    )
