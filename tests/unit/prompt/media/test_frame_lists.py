"""Lists of images decode to the frames of a video, or are refused, in a process of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image as PillowImage

from tests.support import video_files
from tests.support.image_files import data_url, encoded
from vlm_server.api.parsing.media.parse import parse_video
from vlm_server.errors import InvalidVideo
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.prompt.media.decoders import Clip, Decoders
from vlm_server.protocol import FrameSampling
from vlm_server.settings import ImageSettings, Limits, VideoSettings

PARAM = "messages[0].content[1]"
DECODERS = Decoders(ImageSettings(), VideoSettings(), 1)
GREYS = [encoded(image) for image in video_files.greys(range(0, 250, 25))]


def decode(frames: list[bytes], limits: VideoSettings | None = None, **wanted: Any) -> Clip:
    video = parse_video([data_url(frame) for frame in frames], PARAM, Limits())
    video = replace(video, sampling=FrameSampling(**wanted))
    return DECODERS.video(video, limits or VideoSettings(), Cancellation(), factor=16)


def refusal(frames: list[bytes], **limits: Any) -> str:
    with pytest.raises(InvalidVideo) as caught:
        decode(frames, VideoSettings(**limits))
    assert caught.value.param == PARAM
    return caught.value.message


def levels(clip: Clip) -> list[float]:
    return [float(frame.mean()) for frame in clip.frames]


def test_frames_of_list_are_shown_at_its_rate() -> None:
    clip = decode(GREYS, fps=0.5)
    assert levels(clip) == list(range(0, 250, 25))
    assert clip.seconds == tuple(range(0, 20, 2))


def test_long_list_is_sampled_evenly() -> None:
    clip = decode(GREYS, VideoSettings(max_frames=4), fps=1)
    assert levels(clip) == [0, 75, 150, 225]
    assert clip.seconds == (0, 3, 6, 9)


def test_frames_of_list_are_scaled_to_wanted_pixels() -> None:
    images = video_files.noise(1, 2, (128, 64))
    clip = decode([encoded(image) for image in images], max_pixels=128 * 32)
    assert clip.frames.shape == (2, 32, 80, 3)
    wanted = images[0].resize((80, 32), PillowImage.Resampling.BICUBIC)
    assert np.array_equal(clip.frames[0], np.asarray(wanted))


def test_list_with_truncated_frame_is_refused() -> None:
    jpegs = [encoded(image, "JPEG") for image in video_files.noise(1, 3)]
    jpegs[1] = jpegs[1][:-60]
    assert "Frame 1 of the video: the JPEG image" in refusal(jpegs)


def test_list_with_frame_turned_by_exif_is_refused() -> None:
    exif = PillowImage.Exif()
    exif[0x0112] = 6
    image = video_files.noise(1, 1)[0]
    jpegs = [encoded(image, "JPEG"), encoded(image, "JPEG", exif=exif)]
    assert "Frame 1 of the video differs in size" in refusal(jpegs)


def test_list_with_large_frames_is_refused() -> None:
    assert "1000 pixels (video.max_frame_pixels)" in refusal(GREYS, max_frame_pixels=1000)
