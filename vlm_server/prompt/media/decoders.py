"""Decodes images and videos in processes that can be killed, within what a request may cost."""

from __future__ import annotations

import logging
import time
from contextlib import suppress

import msgspec
import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import DecodeBudgetExceeded, InvalidImage
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.platform.child.pool import ChildFailed, ChildPool, ChildTimeout
from vlm_server.prompt.media.image_messages import Refused, pack_job, unpack
from vlm_server.prompt.video import clip
from vlm_server.protocol import Image, Video
from vlm_server.settings import Image as ImageLimits
from vlm_server.settings import Video as VideoLimits

logger = logging.getLogger(__name__)

_IMAGE_MODULE = "vlm_server.prompt.media.image_process"
_WHOLE_PIXELS = 100_000_000
"""So many pixels may take all of `image.decode_seconds`, and fewer their share of it."""
_LEAST_SHARE = 0.05
_TRIES = 2
"""A process may also die because others took all memory."""


class DecodeBudget:
    """What decoding the images of one request may still take, and whether anybody waits for it.

    Of one thread.
    """

    def __init__(self, limits: ImageLimits, cancellation: Cancellation) -> None:
        self.cancellation = cancellation
        self._limits = limits
        self._num_pixels = 0
        self._seconds = 0.0

    def take_pixels(self, num_pixels: int, param: str) -> None:
        """Raises DecodeBudgetExceeded, naming `param`, if they are too many."""
        self._num_pixels += num_pixels
        if self._num_pixels > self._limits.max_request_pixels:
            raise DecodeBudgetExceeded(
                f"The images up to this one have {self._num_pixels} pixels to decode; a request "
                f"may have {self._limits.max_request_pixels} (image.max_request_pixels).",
                param,
            )

    def take_seconds(self, seconds: float) -> None:
        self._seconds += seconds

    @property
    def seconds_left(self) -> float:
        return max(self._allowed_seconds - self._seconds, 0.0)

    def is_late(self, param: str) -> DecodeBudgetExceeded:
        """What to raise when no seconds are left."""
        return DecodeBudgetExceeded(
            f"Decoding the images up to this one takes over {self._allowed_seconds:g} seconds "
            "(image.decode_seconds).",
            param,
        )

    @property
    def _allowed_seconds(self) -> float:
        share = min(max(self._num_pixels / _WHOLE_PIXELS, _LEAST_SHARE), 1.0)
        return share * self._limits.decode_seconds


class Decoders:
    """Two pools of processes, for images and for videos. Thread-safe."""

    def __init__(
        self, image_limits: ImageLimits, video_limits: VideoLimits, num_processes: int
    ) -> None:
        """`num_processes` of each at most."""
        self.image_limits = image_limits
        self.video_limits = video_limits
        memory, seconds = image_limits.decode_memory_bytes, image_limits.decode_seconds
        self._images = ChildPool(
            _IMAGE_MODULE, num_processes, str(memory), str(seconds), memory_bytes=memory
        )
        self._videos = clip.decoder_pool(video_limits, num_processes)

    @property
    def num_tracked(self) -> int:
        """Images and videos that are being decoded, or wait for it."""
        return self._images.num_tracked + self._videos.num_tracked

    def image(self, image: Image, budget: DecodeBudget) -> NDArray[np.uint8]:
        """The pixels of `images.decode_rgb` of `image`, (height, width, 3).

        Raises InvalidImage if it can't be decoded, DecodeBudgetExceeded and Cancelled.
        """
        budget.take_pixels(image.width * image.height, image.param)
        job = pack_job(image)
        for _ in range(_TRIES):
            started = time.monotonic()
            if not budget.seconds_left:
                raise budget.is_late(image.param)
            try:
                decoded = unpack(self._images.run(job, budget.seconds_left, budget.cancellation))
            except ChildTimeout:
                raise budget.is_late(image.param) from None
            except (ChildFailed, ValueError, msgspec.DecodeError) as error:
                logger.warning("the process that decodes a %s image died: %s", image.format, error)
                continue
            finally:
                budget.take_seconds(time.monotonic() - started)
                self._keep_one_warm()
            if isinstance(decoded, Refused):
                raise InvalidImage(decoded.reason, image.param)
            told, pixels = decoded
            return np.frombuffer(pixels, dtype=np.uint8).reshape(told.height, told.width, 3)
        raise InvalidImage(f"the {image.format} picture can't be decoded", image.param)

    def video(self, video: Video, limits: VideoLimits, cancellation: Cancellation) -> clip.Clip:
        """See `clip.decode`."""
        return clip.decode(self._videos, video, limits, cancellation)

    def close(self) -> None:
        """End all processes that are idle."""
        self._images.close()
        self._videos.close()

    def _keep_one_warm(self) -> None:
        """The next image must not wait for a process to start, if this one's has ended."""
        with suppress(ChildFailed):
            self._images.warm_up()
