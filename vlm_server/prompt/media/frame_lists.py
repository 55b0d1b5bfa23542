"""The decoding of a video that is a list of images, in a process that can be killed."""

from __future__ import annotations

import msgspec
from PIL import Image as PillowImage

from vlm_server.errors import InvalidImage, InvalidVideo
from vlm_server.platform.child.messages import Parts
from vlm_server.prompt.media.images import decode_rgb
from vlm_server.prompt.media.messages import Frames, VideoJob, pack
from vlm_server.prompt.media.sampling import frame_size, sample_list
from vlm_server.protocol import Image


def decode_list(job: VideoJob) -> Parts:
    """The sampled frames of a list, all of the size of the first. Raises InvalidVideo."""
    images = msgspec.msgpack.decode(job.video.data, type=list[Image])
    samples = sample_list(len(images), job.limits, job.video.sampling)
    original: tuple[int, int] | None = None
    size, pixels = (0, 0), list[bytes]()
    for sample in samples:
        frame = _decode(images[sample.index], sample.index, job.limits.max_frame_pixels)
        if original is None:
            original = frame.size
            size = frame_size(original, len(samples), job.limits, job.video.sampling, job.factor)
        if frame.size != original:
            raise InvalidVideo(
                f"Frame {sample.index} of the video differs in size from those before it."
            )
        if frame.size != size:
            frame = frame.resize(size, PillowImage.Resampling.BICUBIC)
        pixels.append(frame.tobytes())
    seconds = tuple(sample.seconds for sample in samples)
    return pack(Frames(*size, seconds, (0,) * len(samples)), pixels)


def _decode(image: Image, number: int, max_pixels: int) -> PillowImage.Image:
    if image.width * image.height > max_pixels:
        raise InvalidVideo(
            f"The video's frames have more than {max_pixels} pixels (video.max_frame_pixels)."
        )
    try:
        return decode_rgb(image)
    except InvalidImage as error:
        raise InvalidVideo(f"Frame {number} of the video: {error.message}.") from None
