import itertools
from typing import Any

import pytest

from vlm_server.errors import InvalidVideo
from vlm_server.prompt.media.sampling import FrameSample, frame_size, sample, sample_list
from vlm_server.protocol import FrameSampling
from vlm_server.settings import VideoSettings


def moments(count: int, fps: float) -> list[float]:
    return [number / fps for number in range(count)]


def test_frame_samples_are_evenly_spaced_from_first_to_last() -> None:
    chosen = sample(moments(101, 10), 10.1, VideoSettings(fps=2, max_frames=64))
    assert len(chosen) == 20
    assert chosen[0] == FrameSample(0.0, 0)
    assert chosen[-1].index == 100
    gaps = [b.seconds - a.seconds for a, b in itertools.pairwise(chosen)]
    assert max(gaps) - min(gaps) < 1e-9


@pytest.mark.parametrize(
    ("count", "fps", "num_expected"),
    [(1, 30, 1), (2, 30, 2), (3, 30, 2), (4, 30, 4), (15, 30, 4), (3000, 30, 64)],
)
def test_frame_sample_count_is_bounded_for_long_videos(
    count: int, fps: float, num_expected: int
) -> None:
    chosen = sample(moments(count, fps), count / fps, VideoSettings(fps=2, max_frames=64))
    assert len(chosen) == num_expected
    assert chosen[-1].index == (count - 1 if num_expected > 1 else 0)


def test_long_last_frame_is_sampled_for_its_duration() -> None:
    chosen = sample([0.0, 0.1], 10.1, VideoSettings(fps=2, max_frames=64))
    assert [frame.index for frame in chosen] == [0] + 19 * [1]


def test_still_gives_one_frame_sample() -> None:
    assert sample([0.0], 10.0, VideoSettings(fps=2, max_frames=64)) == (FrameSample(0.0, 0),)


def test_odd_frame_cap_is_rounded_down() -> None:
    assert len(sample(moments(100, 10), 10, VideoSettings(fps=2, max_frames=7))) == 6


def test_frame_samples_follow_time_not_frame_numbers() -> None:
    """Five seconds of one frame, then ten frames in one second."""
    times = [0.0, *(5 + number / 10 for number in range(10))]
    chosen = sample(times, 6.0, VideoSettings(fps=2, max_frames=64))
    assert [frame_sample.index for frame_sample in chosen[:10]] == [0] * 10
    assert chosen[-1].index == 10


def test_frame_sample_is_last_frame_begun_by_then() -> None:
    chosen = sample([0.0, 0.9, 1.1, 2.0], 2.0, VideoSettings(fps=1, max_frames=4))
    assert [frame_sample.index for frame_sample in chosen] == [0, 0, 2, 3]


# ---- frames that a request wants --------------------------------------------------------

TEN_SECONDS = moments(100, 10), 10.0


def wanted_seconds(**wanted: Any) -> list[float]:
    chosen = sample(*TEN_SECONDS, VideoSettings(max_frames=16), FrameSampling(**wanted))
    return [round(frame_sample.seconds, 3) for frame_sample in chosen]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"fps": 0.5}, [0, 2, 4, 6, 8]),
        ({"fps": 0.001}, [0]),
        ({"fps": 1, "start": 7}, [7, 8, 9]),
        ({"fps": 1, "end": 2.5}, [0, 1, 2]),
        ({"fps": 1, "start": 4, "end": 6}, [4, 5]),
        ({"start": 3, "end": 6}, [3, 3.5, 4, 4.5, 5, 5.5]),
        ({"start": 3, "end": 3.35}, [3, 3.1, 3.2, 3.3]),
        ({"num_frames": 1}, [0]),
        ({"num_frames": 3}, [0, 4.95, 9.9]),
        ({"num_frames": 3, "start": 5, "end": 6}, [5, 5.45, 5.9]),
        ({"num_frames": 9, "start": 5, "end": 5.2}, [5, 5.1]),
        ({"end": 99, "num_frames": 2}, [0, 9.9]),
        ({"fps": 1, "max_frames": 4}, [0, 3.3, 6.6, 9.9]),
    ],
)
def test_request_chooses_frames_by_rate_number_and_part(
    wanted: dict[str, Any], expected: list[float]
) -> None:
    assert wanted_seconds(**wanted) == pytest.approx(expected)


@pytest.mark.parametrize("wanted", [{"fps": 60}, {"num_frames": 10**9}, {"max_frames": 10**9}])
def test_request_gets_no_more_frames_than_settings_allow(wanted: dict[str, Any]) -> None:
    assert len(wanted_seconds(**wanted)) == 16


def test_parts_of_one_video_share_frames_of_equal_times() -> None:
    early, late = (set(wanted_seconds(fps=2, start=at, end=at + 5)) for at in (0, 2))
    assert len(early & late) == 6


def test_part_after_end_of_video_is_refused() -> None:
    with pytest.raises(InvalidVideo, match="`start` is at 10 seconds, and the video ends at 10"):
        wanted_seconds(start=10)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"num_frames": 3}, [0, 2, 4]),
        ({"num_frames": 99}, [0, 1, 2, 3, 4]),
        ({"max_frames": 2}, [0, 4]),
        ({"fps": 10, "start": 0.2, "end": 0.4}, [2, 3]),
    ],
)
def test_all_frames_of_list_are_shown_unless_fewer_are_wanted(
    wanted: dict[str, Any], expected: list[int]
) -> None:
    chosen = sample_list(5, VideoSettings(), FrameSampling(**wanted))
    assert [frame_sample.index for frame_sample in chosen] == expected
    rate = wanted.get("fps", 2)
    assert [frame.seconds for frame in chosen] == [index / rate for index in expected]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, (512, 288)),
        ({"max_pixels": 10**9}, (512, 288)),
        ({"max_pixels": 40_000}, (252, 140)),
        ({"max_pixels": 1}, (28, 28)),
        ({"total_pixels": 80_000}, (252, 140)),
        ({"total_pixels": 80_000, "max_pixels": 20_000}, (168, 84)),
        ({"min_pixels": 10**9}, (504, 308)),
    ],
)
def test_frame_size_keeps_bounds_of_request_and_settings(
    wanted: dict[str, Any], expected: tuple[int, int]
) -> None:
    size = frame_size((1920, 1080), 4, VideoSettings(), FrameSampling(**wanted), 28)
    assert size == expected


def test_small_frames_are_enlarged_to_least_pixels() -> None:
    wanted = FrameSampling(min_pixels=40_000)
    assert frame_size((96, 64), 4, VideoSettings(), wanted, 32) == (256, 192)
