"""The decoding of images and videos, in processes that can be killed, within a request's budget."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import DecodeBudgetExceeded, InvalidImage, InvalidVideo
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.platform.child.pool import ChildFailed, ChildPool, ChildTimeout
from vlm_server.prompt.media.messages import Frames, Undecodable, VideoJob, unpack
from vlm_server.protocol import Image, Video
from vlm_server.settings import ImageSettings, VideoSettings

logger = logging.getLogger(__name__)

_MODULE = "vlm_server.prompt.media.process"
_WHOLE_PIXELS = 100_000_000
"""The size of an image that may take all of `image.decode_timeout_seconds`; smaller ones get a
share."""
_MIN_SHARE = 0.05
_TRIES = 2
"""Attempts at an image: a process may also die because the machine is short of memory."""


@dataclass(frozen=True, slots=True)
class Clip:
    """The sampled frames of a video.

    frames: (count, height, width, 3) uint8 RGB, upright. seconds: the time of each, from the first
    on. is_cut: whether the file is truncated.
    """

    frames: NDArray[np.uint8]
    seconds: tuple[float, ...]
    is_cut: bool = False

    @property
    def sampled(self) -> SampledFrames:
        return SampledFrames(self.seconds, self.is_cut)


@dataclass(frozen=True, slots=True)
class SampledFrames:
    """A `Clip` without pixels: the times of its frames, and whether the file is truncated.

    hashes: of each frame, if frames are shown as images.
    """

    seconds: tuple[float, ...]
    is_cut: bool
    hashes: tuple[str, ...] = ()


class DecodeBudget:
    """The pixels and seconds left for decoding one request's images. Not thread-safe."""

    def __init__(self, limits: ImageSettings, cancellation: Cancellation) -> None:
        self.cancellation = cancellation
        self._limits = limits
        self._num_pixels = 0
        self._seconds = 0.0

    def take_pixels(self, num_pixels: int, param: str) -> None:
        """Use up pixels. Raises DecodeBudgetExceeded, naming `param`, if there are too many."""
        self._num_pixels += num_pixels
        if self._num_pixels > self._limits.max_decoded_pixels:
            raise DecodeBudgetExceeded(
                f"The images up to this one have {self._num_pixels} pixels to decode; a request "
                f"may have {self._limits.max_decoded_pixels} (image.max_decoded_pixels).",
                param,
            )

    def take_seconds(self, seconds: float) -> None:
        self._seconds += seconds

    @property
    def seconds_left(self) -> float:
        return max(self._allowed_seconds - self._seconds, 0.0)

    def late_error(self, param: str) -> DecodeBudgetExceeded:
        """The error for an image when no time is left."""
        return DecodeBudgetExceeded(
            f"Decoding the images up to this one takes over {self._allowed_seconds:g} seconds "
            "(image.decode_timeout_seconds).",
            param,
        )

    @property
    def _allowed_seconds(self) -> float:
        share = min(max(self._num_pixels / _WHOLE_PIXELS, _MIN_SHARE), 1.0)
        return share * self._limits.decode_timeout_seconds


class Decoders:
    """Two pools of processes, for images and for videos. Thread-safe."""

    def __init__(
        self, image_limits: ImageSettings, video_limits: VideoSettings, num_processes: int
    ) -> None:
        """num_processes: bound on each pool."""
        self.image_limits = image_limits
        self.video_limits = video_limits
        memory_bytes, seconds = (
            image_limits.max_decode_memory_bytes,
            image_limits.decode_timeout_seconds,
        )
        self._images = _pool("image", num_processes, memory_bytes, seconds)
        memory_bytes = video_limits.max_decode_memory_bytes
        seconds = 2 * video_limits.decode_timeout_seconds + 2  # several threads decode
        self._videos = _pool("video", num_processes, memory_bytes, seconds)

    @property
    def num_tracked(self) -> int:
        """Images and videos that are being decoded, or wait for a process."""
        return self._images.num_tracked + self._videos.num_tracked

    def image(self, image: Image, budget: DecodeBudget) -> NDArray[np.uint8]:
        """The pixels of `image`, (height, width, 3).

        Raises InvalidImage if it can't be decoded, DecodeBudgetExceeded and Cancelled.
        """
        budget.take_pixels(image.width * image.height, image.param)
        job = msgspec.msgpack.encode(image)
        for _ in range(_TRIES):
            started_at = time.monotonic()
            if not budget.seconds_left:
                raise budget.late_error(image.param)
            try:
                answer = self._images.run(job, budget.seconds_left, budget.cancellation)
                frames, pixels = unpack(answer)
            except ChildTimeout:
                raise budget.late_error(image.param) from None
            except (ChildFailed, ValueError) as error:
                logger.warning("the process that decodes a %s image died: %s", image.format, error)
                continue
            finally:
                budget.take_seconds(time.monotonic() - started_at)
                with suppress(ChildFailed):  # start one for the next image
                    self._images.warm_up()
            if isinstance(frames, Undecodable):
                raise InvalidImage(frames.reason, image.param)
            return np.frombuffer(pixels, dtype=np.uint8).reshape(frames.height, frames.width, 3)
        raise InvalidImage(f"the {image.format} image can't be decoded", image.param)

    def video(
        self, video: Video, limits: VideoSettings, cancellation: Cancellation, factor: int = 1
    ) -> Clip:
        """The complete frames of `video` at the rate and size that it wants, within `limits`.

        factor: a divisor of both sides that suits the model. Raises InvalidVideo if it can't be
        decoded or is over a limit, and Cancelled.
        """
        seconds = limits.decode_timeout_seconds
        job = msgspec.msgpack.encode(VideoJob(video, limits, factor))
        try:
            frames, pixels = unpack(self._videos.run(job, seconds, cancellation))
        except ChildTimeout:
            reason = f"Decoding the video takes over {seconds:g} seconds."
            raise InvalidVideo(reason, video.param) from None
        except (ChildFailed, ValueError) as error:
            logger.warning("the process that decodes a %s video died: %s", video.format, error)
            raise InvalidVideo("The video can't be decoded.", video.param) from None
        if isinstance(frames, Undecodable):
            raise InvalidVideo(frames.reason, video.param)
        try:
            return Clip(_upright(frames, pixels), frames.seconds, frames.is_cut)
        except ValueError:
            raise InvalidVideo("The video's frames differ in size.", video.param) from None

    def close(self) -> None:
        """End all processes that are idle."""
        self._images.close()
        self._videos.close()


def _pool(kind: str, size: int, memory_bytes: int, seconds: float) -> ChildPool:
    limits = str(memory_bytes), str(seconds)
    return ChildPool(_MODULE, size, kind, *limits, memory_bytes=memory_bytes)


def _upright(frames: Frames, pixels: memoryview) -> NDArray[np.uint8]:
    """Raises ValueError if some frames are to be turned to another shape than others."""
    shape = (len(frames.seconds), frames.height, frames.width, 3)
    stored_pixels = np.frombuffer(pixels, np.uint8).reshape(shape)
    if not any(frames.quarter_turns):
        return stored_pixels
    turned = zip(stored_pixels, frames.quarter_turns, strict=True)
    return np.stack([np.rot90(frame, turns) for frame, turns in turned])
