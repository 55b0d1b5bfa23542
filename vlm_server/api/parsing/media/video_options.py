"""The fields of requests about the frames of videos, in the spellings of several clients.

They come from vLLM, Transformers, and Qwen's `qwen-vl-utils` and API. A part's own fields replace
those of the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct

from vlm_server.errors import InvalidRequest
from vlm_server.protocol import FrameSampling

MIN_FPS, MAX_FPS = 0.001, 60
_INT32_MAX = 2**31 - 1
Fps = Annotated[float, Meta(ge=MIN_FPS, le=MAX_FPS)]
"""Frames per second."""
_Size = Annotated[int, Meta(ge=1, le=_INT32_MAX)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class VideoOptions(Struct, kw_only=True, omit_defaults=True):
    """The wanted frames of a video: see `protocol.FrameSampling`.

    `video_fps`, `nframes`, `video_start` and `video_end` are other names of `fps`, `num_frames`,
    `start` and `end`.
    """

    fps: Fps | None = None
    video_fps: Fps | None = None
    num_frames: _Size | None = None
    nframes: _Size | None = None
    max_frames: _Size | None = None
    start: _Seconds | None = None
    video_start: _Seconds | None = None
    end: _Seconds | None = None
    video_end: _Seconds | None = None
    min_pixels: _Size | None = None
    max_pixels: _Size | None = None
    total_pixels: _Size | None = None


class ProcessorOptions(VideoOptions, forbid_unknown_fields=True, kw_only=True):
    """`mm_processor_kwargs`: of all videos; bounds on pixels are also those of images."""

    do_sample_frames: bool | None = None


class VideoLoading(Struct, forbid_unknown_fields=True):
    """vLLM's options of reading videos; -1 is no option."""

    num_frames: Annotated[int, Meta(ge=-1, le=_INT32_MAX)] | None = None
    fps: Annotated[float, Meta(ge=-1, le=MAX_FPS)] | None = None


class MediaLoading(Struct, forbid_unknown_fields=True):
    """`media_io_kwargs`."""

    video: VideoLoading | None = None


class MediaOptions(Struct, kw_only=True, omit_defaults=True):
    """The fields of a request about all its images and videos."""

    mm_processor_kwargs: ProcessorOptions | None = None
    media_io_kwargs: MediaLoading | None = None
    video_fps: Fps | None = None


class Given(NamedTuple):
    """The value of a field, and its path in the request."""

    value: float
    param: str


VideoFields = Mapping[str, Given]
"""Fields about frames by the names in `FrameSampling`."""
NO_FIELDS: VideoFields = {}

_OTHER_NAMES = {
    "video_fps": "fps",
    "nframes": "num_frames",
    "video_start": "start",
    "video_end": "end",
}


def fields_of_request(request: MediaOptions) -> VideoFields:
    """The fields for all videos. Raises InvalidRequest if two contradict each other.

    vLLM reads `num_frames` first and `fps` of these: with both, the former is the most frames.
    """
    options, loading = request.mm_processor_kwargs, request.media_io_kwargs
    path = "mm_processor_kwargs"
    if options is not None and options.do_sample_frames is False:
        param = f"{path}.do_sample_frames"
        raise InvalidRequest("`do_sample_frames` must be true: videos are sampled.", param)
    fields = fields_of((path, options))
    if request.video_fps is not None:
        _add(fields, "fps", Given(request.video_fps, "video_fps"))
    video = None if loading is None else loading.video
    if video is None:
        return fields
    path = "media_io_kwargs.video"
    if video.fps is not None and video.fps > 0:
        if video.fps < MIN_FPS:
            raise InvalidRequest(f"`fps` must be -1 or at least {MIN_FPS}.", f"{path}.fps")
        _add(fields, "fps", Given(video.fps, f"{path}.fps"))
    if video.num_frames is not None and video.num_frames > 0:
        name = "max_frames" if "fps" in fields else "num_frames"
        _add(fields, name, Given(video.num_frames, f"{path}.num_frames"))
    return fields


def fields_of(*sources: tuple[str, Any]) -> dict[str, Given]:
    """The fields of structs with `VideoOptions`, each at a path; other structs have none.

    Raises InvalidRequest if two contradict each other.
    """
    fields: dict[str, Given] = {}
    for path, options in sources:
        if not isinstance(options, VideoOptions):
            continue
        for name in VideoOptions.__struct_fields__:
            if (value := getattr(options, name)) is not None:
                _add(fields, _OTHER_NAMES.get(name, name), Given(value, f"{path}.{name}"))
    return fields


def _add(fields: dict[str, Given], name: str, given: Given) -> None:
    other = fields.setdefault(name, given)
    if other.value != given.value:
        raise InvalidRequest(
            f"`{given.param}` is {given.value:g}, but `{other.param}` is {other.value:g}.",
            given.param,
        )


def frame_sampling(request: VideoFields, part: VideoFields, *, is_list: bool) -> FrameSampling:
    """The frames of one video. Raises InvalidRequest for fields that contradict each other.

    is_list: whether the video is a list of frames, of which `fps` is the rate.
    """
    fields = {**request, **part}
    if not is_list:
        _choose_rate_or_number(fields, part)
    _choose_number_or_most(fields, part)
    _check_order(fields)
    values: dict[str, Any] = {name: given.value for name, given in fields.items()}
    number = fields.get("num_frames")
    return FrameSampling(**values, param="" if number is None else number.param)


def _choose_rate_or_number(fields: dict[str, Given], part: VideoFields) -> None:
    """Drop the request's `fps` or `num_frames` in favour of the other one of the part."""
    names = "fps", "num_frames"
    if any(name in part for name in names):
        for name in names:
            if name not in part:
                fields.pop(name, None)
    if all(name in fields for name in names):
        raise InvalidRequest(
            "`fps` and `num_frames` exclude each other; `max_frames` bounds the frames of `fps`.",
            fields["num_frames"].param,
        )


def _choose_number_or_most(fields: dict[str, Given], part: VideoFields) -> None:
    """Drop the request's `max_frames` if the part wants more; that of the part bounds any number.

    Raises InvalidRequest if both fields are the part's, or the request's.
    """
    number, most = fields.get("num_frames"), fields.get("max_frames")
    if number is None or most is None or number.value <= most.value:
        return
    if ("num_frames" in part) == ("max_frames" in part):
        raise InvalidRequest("`num_frames` is above `max_frames`.", number.param)
    if "num_frames" in part:
        del fields["max_frames"]


def _check_order(fields: VideoFields) -> None:
    start, end = fields.get("start"), fields.get("end")
    if end is not None and end.value <= (start.value if start else 0):
        raise InvalidRequest("`start` must be before `end`.", (start or end).param)
    low, high = fields.get("min_pixels"), fields.get("max_pixels")
    if low is not None and high is not None and low.value > high.value:
        raise InvalidRequest("`min_pixels` is above `max_pixels`.", low.param)
