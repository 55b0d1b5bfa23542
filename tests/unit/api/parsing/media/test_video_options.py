"""The spellings of fields about frames mean the same, and contradictions are refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from vlm_server.api.parsing.media.video_options import (
    MediaOptions,
    VideoOptions,
    fields_of,
    fields_of_request,
    frame_sampling,
)
from vlm_server.errors import InvalidRequest
from vlm_server.protocol import FrameSampling

PART = "messages[0].content[0]"


def sampling(
    request: dict[str, Any], part: dict[str, Any], *, is_list: bool = False
) -> FrameSampling:
    """The frames of a video, without the name of a field."""
    options = msgspec.convert(request, MediaOptions)
    fields = fields_of((PART, msgspec.convert(part, VideoOptions)))
    wanted = frame_sampling(fields_of_request(options), fields, is_list=is_list)
    return msgspec.structs.replace(wanted, param="")


def processor(**fields: Any) -> dict[str, Any]:
    return {"mm_processor_kwargs": fields}


def reading(**fields: Any) -> dict[str, Any]:
    return {"media_io_kwargs": {"video": fields}}


@pytest.mark.parametrize(
    ("request_fields", "part", "wanted"),
    [
        ({}, {}, FrameSampling()),
        ({}, {"fps": 1}, FrameSampling(fps=1)),
        ({}, {"video_fps": 1, "fps": 1}, FrameSampling(fps=1)),
        ({"video_fps": 1}, {}, FrameSampling(fps=1)),
        (processor(fps=1, do_sample_frames=True), {}, FrameSampling(fps=1)),
        (reading(fps=1, num_frames=-1), {}, FrameSampling(fps=1)),
        (reading(num_frames=8, fps=-1), {}, FrameSampling(num_frames=8)),
        (reading(num_frames=8, fps=1), {}, FrameSampling(fps=1, max_frames=8)),
        (processor(fps=1) | reading(num_frames=8), {}, FrameSampling(fps=1, max_frames=8)),
        ({}, {"nframes": 8}, FrameSampling(num_frames=8)),
        (
            {},
            {"video_start": 1, "video_end": 2.5, "total_pixels": 9000},
            FrameSampling(start=1, end=2.5, total_pixels=9000),
        ),
        (processor(fps=1, max_pixels=5), {"fps": 2}, FrameSampling(fps=2, max_pixels=5)),
        (processor(fps=1, start=1), {"num_frames": 2}, FrameSampling(num_frames=2, start=1)),
        (processor(num_frames=9), {"fps": 2, "max_frames": 4}, FrameSampling(fps=2, max_frames=4)),
        (processor(max_frames=4), {"num_frames": 9}, FrameSampling(num_frames=9)),
        (processor(fps=1) | reading(num_frames=4), {"nframes": 9}, FrameSampling(num_frames=9)),
        (processor(max_frames=4), {"nframes": 3}, FrameSampling(num_frames=3, max_frames=4)),
        (processor(num_frames=9), {"max_frames": 4}, FrameSampling(num_frames=9, max_frames=4)),
    ],
)
def test_spellings_of_clients_mean_same_frames(
    request_fields: dict[str, Any], part: dict[str, Any], wanted: FrameSampling
) -> None:
    assert sampling(request_fields, part) == wanted


def test_rate_and_number_go_together_in_list_of_frames() -> None:
    wanted = FrameSampling(fps=1, num_frames=8)
    assert sampling({}, {"fps": 1, "num_frames": 8}, is_list=True) == wanted


@pytest.mark.parametrize(
    ("request_fields", "part", "param"),
    [
        ({}, {"fps": 1, "num_frames": 8}, f"{PART}.num_frames"),
        ({}, {"fps": 1, "nframes": 8}, f"{PART}.nframes"),
        (processor(fps=1, num_frames=8), {}, "mm_processor_kwargs.num_frames"),
        ({}, {"fps": 1, "video_fps": 2}, f"{PART}.video_fps"),
        ({"video_fps": 1} | processor(fps=2), {}, "video_fps"),
        (processor(fps=2) | reading(fps=1), {}, "media_io_kwargs.video.fps"),
        (reading(fps=1e-300), {}, "media_io_kwargs.video.fps"),
        (processor(do_sample_frames=False), {}, "mm_processor_kwargs.do_sample_frames"),
        ({}, {"start": 2, "end": 1}, f"{PART}.start"),
        ({}, {"start": 2, "end": 2}, f"{PART}.start"),
        ({}, {"end": 0}, f"{PART}.end"),
        (processor(end=1), {"video_start": 2}, f"{PART}.video_start"),
        ({}, {"min_pixels": 9, "max_pixels": 8}, f"{PART}.min_pixels"),
        ({}, {"nframes": 9, "max_frames": 8}, f"{PART}.nframes"),
        (processor(num_frames=9, max_frames=8), {}, "mm_processor_kwargs.num_frames"),
    ],
)
def test_contradictory_fields_of_videos_are_refused_by_name(
    request_fields: dict[str, Any], part: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sampling(request_fields, part)
    assert refused.value.param == param
