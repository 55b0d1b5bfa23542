import itertools

import pytest

from vlm_server.prompt.media.videos import FrameSample, sample


def moments(count: int, fps: float) -> list[float]:
    return [number / fps for number in range(count)]


def test_frame_samples_are_evenly_spaced_from_first_to_last() -> None:
    chosen = sample(moments(101, 10), 10.1, fps=2, max_frames=64)
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
    chosen = sample(moments(count, fps), count / fps, fps=2, max_frames=64)
    assert len(chosen) == num_expected
    assert chosen[-1].index == (count - 1 if num_expected > 1 else 0)


def test_long_last_frame_is_sampled_for_its_duration() -> None:
    chosen = sample([0.0, 0.1], 10.1, fps=2, max_frames=64)
    assert [frame.index for frame in chosen] == [0] + 19 * [1]


def test_still_gives_one_frame_sample() -> None:
    assert sample([0.0], 10.0, fps=2, max_frames=64) == (FrameSample(0.0, 0),)


def test_odd_frame_cap_is_rounded_down() -> None:
    assert len(sample(moments(100, 10), 10, fps=2, max_frames=7)) == 6


def test_frame_samples_follow_time_not_frame_numbers() -> None:
    """Five seconds of one frame, then ten frames in one second."""
    times = [0.0, *(5 + number / 10 for number in range(10))]
    chosen = sample(times, 6.0, fps=2, max_frames=64)
    assert [frame_sample.index for frame_sample in chosen[:10]] == [0] * 10
    assert chosen[-1].index == 10


def test_frame_sample_is_last_frame_begun_by_then() -> None:
    chosen = sample([0.0, 0.9, 1.1, 2.0], 2.0, fps=1, max_frames=4)
    assert [frame_sample.index for frame_sample in chosen] == [0, 0, 2, 3]
