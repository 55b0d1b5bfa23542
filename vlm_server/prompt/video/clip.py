"""Decodes a video to frames in memory, in a child process of its own.

A decoder that is given hostile bytes may hang, crash or allocate all memory. So each video gets
its own process, which is killed at a deadline; if it dies, only that request fails.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from vlm_server.errors import InvalidVideo
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.platform.child.pool import ChildFailed, ChildPool, ChildTimeout
from vlm_server.prompt.video.messages import Frames, Job, Refused, pack_job, unpack
from vlm_server.protocol import Video
from vlm_server.settings import Video as Limits

logger = logging.getLogger(__name__)

_MODULE = "vlm_server.prompt.video.process"


@dataclass(frozen=True, slots=True)
class Clip:
    """The frames of a video that the model sees.

    frames: (count, height, width, 3) uint8 RGB, upright. seconds: the time of each of them,
    counted from the first. is_cut: the video has more, which is not whole.
    """

    frames: NDArray[np.uint8]
    seconds: tuple[float, ...]
    is_cut: bool = False


def decoder_pool(limits: Limits, size: int) -> ChildPool:
    """Processes that decode videos, at most `size` at once."""
    job_seconds = 2 * limits.decode_timeout_seconds + 2  # several threads decode
    memory = limits.decode_memory_bytes
    return ChildPool(_MODULE, size, str(memory), str(job_seconds), memory_bytes=memory)


def decode(pool: ChildPool, video: Video, limits: Limits, cancellation: Cancellation) -> Clip:
    """The frames of `video` at the rate and size of `limits`, of those that are whole.

    Raises InvalidVideo if it can't be decoded, is over a limit or takes too long, and Cancelled.
    """
    job = pack_job(Job(video.data, video.format, limits, video.is_cut))
    try:
        answer = pool.run(job, limits.decode_timeout_seconds, cancellation)
        frames, pixels = unpack(answer)
    except ChildTimeout:
        seconds = limits.decode_timeout_seconds
        reason = f"Decoding the video takes over {seconds:g} seconds."
        raise InvalidVideo(reason, video.param) from None
    except (ChildFailed, ValueError, msgspec.DecodeError) as error:
        logger.warning("the process that decodes a %s video died: %s", video.format, error)
        raise InvalidVideo("The video can't be decoded.", video.param) from None
    if isinstance(frames, Refused):
        raise InvalidVideo(frames.reason, video.param)
    try:
        return Clip(_upright(frames, pixels), frames.seconds, frames.is_cut)
    except ValueError:
        raise InvalidVideo("The video's frames differ in size.", video.param) from None


def _upright(frames: Frames, pixels: memoryview) -> NDArray[np.uint8]:
    """Raises ValueError if some frames are to be turned to another shape than others."""
    shape = (len(frames.seconds), frames.height, frames.width, 3)
    stored = np.frombuffer(pixels, np.uint8).reshape(shape)
    if not any(frames.quarter_turns):
        return stored
    turned = zip(stored, frames.quarter_turns, strict=True)
    return np.stack([np.rot90(frame, turns) for frame, turns in turned])
