"""The frames of a video to decode: which, at which times, and of which size.

Knows times and sizes; knows nothing of containers and pixels.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vlm_server.errors import InvalidVideo
from vlm_server.protocol import FrameSampling
from vlm_server.settings import VideoSettings

MIN_FRAMES = 4
"""The fewest frames sampled by default, to show motion; a video may have fewer."""
_SAME_TIME_SECONDS = 1e-6
_FRAMES_OF_A_PAIR = 2
_BY_DEFAULT = FrameSampling()


@dataclass(frozen=True, slots=True)
class FrameSample:
    """The frame `index` is shown at `seconds`."""

    seconds: float
    index: int


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a video from `start` to `end`, in seconds, with frames `first` to `last`."""

    start: float
    end: float
    first: int
    last: int

    @property
    def num_frames(self) -> int:
        return self.last - self.first + 1


def sample(
    times: Sequence[float],
    duration: float,
    limits: VideoSettings,
    wanted: FrameSampling = _BY_DEFAULT,
) -> tuple[FrameSample, ...]:
    """Samples of a video, each the last frame begun by its time.

    times: of all frames, in seconds, ascending from 0. duration: to the last frame's end. A frame
    may be sampled more than once. By default the samples are evenly spaced from the first frame to
    the last, and their number is even, or 1 for a still. With `fps`, `start` or `end` they are
    1/fps apart from `start` on, unless there would be too many. Raises InvalidVideo if `start` is
    after the end.
    """
    part = _part(times, duration, wanted)
    moments = _moments(part, times, limits, wanted)
    return tuple(
        FrameSample(moment, max(bisect_right(times, moment + _SAME_TIME_SECONDS) - 1, 0))
        for moment in moments
    )


def sample_list(
    count: int, limits: VideoSettings, wanted: FrameSampling
) -> tuple[FrameSample, ...]:
    """Samples of a list of `count` frames taken at a constant rate: all, unless there are too many.

    Raises InvalidVideo if `start` is after the last frame.
    """
    fps = wanted.fps or limits.fps
    times = [number / fps for number in range(count)]
    part = _part(times, count / fps, wanted)
    num_wanted = min(wanted.num_frames or part.num_frames, _max_frames(limits, wanted))
    indices = _spread(part.first, part.last, min(num_wanted, part.num_frames))
    return tuple(FrameSample(times[round(index)], round(index)) for index in indices)


def frame_size(
    size: tuple[int, int],
    num_frames: int,
    limits: VideoSettings,
    wanted: FrameSampling = _BY_DEFAULT,
    factor: int = 1,
) -> tuple[int, int]:
    """The width and height to which a frame of `size` is scaled.

    With bounds of the request, both are multiples of `factor`, to which the model's processor
    would round them: rounded down, so that `max_pixels` holds.
    """
    width, height = size
    most_by_side = limits.max_side_pixels / max(size)
    scale = min(1.0, most_by_side)
    round_side: Callable[[float], int] = math.floor
    if wanted.min_pixels is not None and width * height * scale**2 < wanted.min_pixels:
        scale = min(math.sqrt(wanted.min_pixels / (width * height)), most_by_side)
        round_side = math.ceil
    max_pixels = _max_pixels(num_frames, wanted)
    if max_pixels is not None and width * height * scale**2 > max_pixels:
        scale, round_side = math.sqrt(max_pixels / (width * height)), math.floor
    elif round_side is math.floor:
        return max(1, round(width * scale)), max(1, round(height * scale))
    most = limits.max_side_pixels // factor
    width, height = (max(1, min(round_side(side * scale / factor), most)) for side in size)
    return width * factor, height * factor


def _max_pixels(num_frames: int, wanted: FrameSampling) -> float | None:
    bounds = [] if wanted.max_pixels is None else [float(wanted.max_pixels)]
    if wanted.total_pixels is not None:
        bounds.append(wanted.total_pixels * _FRAMES_OF_A_PAIR / max(num_frames, _FRAMES_OF_A_PAIR))
    return min(bounds, default=None)


def _part(times: Sequence[float], duration: float, wanted: FrameSampling) -> _Part:
    duration = max(duration, times[-1])
    if wanted.start and wanted.start >= duration:
        raise InvalidVideo(
            f"`start` is at {wanted.start:g} seconds, and the video ends at {duration:g}."
        )
    end = duration if wanted.end is None else min(wanted.end, duration)
    first = max(bisect_right(times, wanted.start + _SAME_TIME_SECONDS) - 1, 0)
    last = max(bisect_left(times, end - _SAME_TIME_SECONDS) - 1, first)
    if end == duration:
        last = len(times) - 1
    return _Part(wanted.start, end, first, last)


def _moments(
    part: _Part, times: Sequence[float], limits: VideoSettings, wanted: FrameSampling
) -> list[float]:
    fps, cap = wanted.fps or limits.fps, _max_frames(limits, wanted)
    seconds = part.end - part.start
    last = max(times[part.last], part.end - 1 / fps, part.start)
    if wanted.num_frames is not None:
        return _spread(part.start, last, min(wanted.num_frames, part.num_frames, cap))
    if wanted.fps is None and wanted.start == 0 and wanted.end is None:
        count = min(max(round(seconds * fps), min(MIN_FRAMES, part.num_frames)), cap)
        return _spread(part.start, last, 1 if part.num_frames == 1 else count - count % 2)
    count = max(1, math.ceil(seconds * fps - _SAME_TIME_SECONDS))
    if wanted.fps is None and count < (fewest := min(MIN_FRAMES, part.num_frames)):
        return _spread(part.start, last, min(fewest, cap))
    if count > cap:
        return _spread(part.start, last, cap - cap % 2)
    return [part.start + number / fps for number in range(count)]


def _max_frames(limits: VideoSettings, wanted: FrameSampling) -> int:
    return min(limits.max_frames, wanted.max_frames or limits.max_frames)


def _spread(start: float, end: float, count: int) -> list[float]:
    """`count` numbers from `start` to `end` at equal intervals; `start` alone for less than two."""
    if count < 2:
        return [start]
    return [start + number * (end - start) / (count - 1) for number in range(count)]
