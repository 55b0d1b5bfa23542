"""Chooses which frames of a video the model sees."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

MIN_FRAMES = 4
"""Fewer would not show motion. Applies to videos that have as many."""
_SAME_TIME_SECONDS = 1e-6


@dataclass(frozen=True, slots=True)
class Sample:
    """The frame `index` is shown at `seconds`."""

    seconds: float
    index: int


def sample(
    times: Sequence[float], duration: float, fps: float, max_frames: int
) -> tuple[Sample, ...]:
    """Samples at equal intervals from the first frame on, `fps` per second.

    `times` are the frames' own, in seconds, ascending from 0; `duration` includes the last
    frame's. A frame that is shown for a long time is sampled more than once. There are at most
    `max_frames` samples, an even number since models take frames in pairs, or one for a still.
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
