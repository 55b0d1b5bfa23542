"""The newest frame, the window, and the fate of every frame."""

from __future__ import annotations

from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from vlm_server.api.dialects.openai.watch.frame_queue import Frame, FrameQueue, Stamp
from vlm_server.api.parsing.media.frame import SIDE, FrameFacts


def frame(number: int, level: int) -> Frame:
    facts = FrameFacts("JPEG", 8, 8, f"{number}-{level}", bytes([level]) * (SIDE * SIDE * 3))
    return Frame(Stamp(number, float(number)), b"%d" % number, facts)


def queue(window: int = 1) -> FrameQueue:
    return FrameQueue(window, min_change=0.01, pixel_change=10)


def taken(frames: FrameQueue) -> list[int]:
    return [each.stamp.number for each in frames.take()]


def test_newest_frame_replaces_waiting_one() -> None:
    frames = queue()
    for number, level in ((1, 0), (2, 50), (3, 100)):
        frames.offer(frame(number, level))
    assert taken(frames) == [3]
    assert frames.counts.skipped == 2
    assert taken(frames) == []
    assert not frames.has_news.is_set()


def test_frame_like_last_asked_is_dropped() -> None:
    frames = queue()
    frames.offer(frame(1, 100))
    frames.take()
    assert frames.offer(frame(2, 110)) == 0.0
    assert taken(frames) == []
    assert frames.offer(frame(3, 111)) == 1.0
    assert taken(frames) == [3]
    assert frames.counts.unchanged == 1


def test_slow_changes_add_up() -> None:
    frames, asked = queue(), list[int]()
    for number in range(1, 23):
        frames.offer(frame(number, 2 * number))
        asked += taken(frames)
    assert asked == [1, 7, 13, 19]


def test_frame_read_late_does_not_replace_newer_one_of_known_bytes() -> None:
    """The camera shows frame 1 again while frame 2 is still being measured."""
    frames = queue()
    frames.offer(frame(1, 0))
    frames.take()
    assert frames.confirms(3, b"1")
    frames.offer(frame(2, 100))
    assert taken(frames) == []
    assert (frames.counts.unchanged, frames.counts.skipped) == (1, 1)
    assert not frames.confirms(4, b"2")


def test_scene_that_returns_before_its_turn_is_not_asked_about() -> None:
    frames = queue()
    frames.offer(frame(1, 0))
    frames.take()
    frames.offer(frame(2, 100))
    frames.offer(frame(3, 0))
    assert not frames.has_news.is_set()
    assert taken(frames) == []
    assert (frames.counts.skipped, frames.counts.unchanged) == (1, 1)


def test_late_frame_does_not_replace_newer_one() -> None:
    frames = queue()
    frames.offer(frame(2, 100))
    frames.offer(frame(1, 0))
    assert taken(frames) == [2]
    assert frames.counts.skipped == 1


def test_window_rolls() -> None:
    frames = queue(window=3)
    seen = []
    for number in range(1, 6):
        frames.offer(frame(number, 40 * number))
        seen.append(taken(frames))
    assert seen == [[1], [1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_frame_put_back_is_asked_again_unless_newer_one_waits() -> None:
    frames = queue(window=2)
    frames.offer(frame(1, 0))
    frames.take()
    frames.put_back()
    assert frames.has_news.is_set()
    assert taken(frames) == [1]
    frames.offer(frame(2, 100))
    frames.put_back()
    assert taken(frames) == [2]
    assert frames.counts.skipped == 1


def test_frame_at_fault_leaves_window() -> None:
    frames = queue(window=2)
    frames.offer(frame(1, 0))
    frames.take()
    frames.offer(frame(2, 100))
    frames.take()
    frames.drop_last()
    frames.offer(frame(3, 100))
    assert taken(frames) == [1, 3]
    assert frames.counts.failed == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 255)), max_size=60), st.integers(1, 4))
def test_frames_have_one_fate_each_and_window_bounds_bytes(
    moves: list[tuple[int, int]], window: int
) -> None:
    """Of frames given, taken, put back and dropped in any order."""
    frames, number, in_question = queue(window), 0, False
    for move, level in moves:
        if move <= 1:
            number += 1
            frames.offer(frame(number, level))
        elif in_question:
            if move == 2:
                frames.put_back()
            else:
                frames.drop_last()
            in_question = False
        else:
            in_question = bool(frames.take())
            frames.counts.asked += in_question and move == 3
            in_question = in_question and move != 3
        assert frames.num_bytes <= (window + 1) * 2
    counts = asdict(frames.counts)
    waiting = int(frames._newest is not None) + in_question
    assert sum(counts.values()) + waiting == number
