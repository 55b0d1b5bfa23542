"""The messages between a preparer thread and the process that decodes a video.

A job is a `Job` as msgpack. The answer is the pixels of all frames, one after the other, described
by `Frames`; or none, described by `Refused`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vlm_server import settings
from vlm_server.platform.child import messages


class Job(msgspec.Struct, frozen=True, tag="job"):
    """Decode `data`, which is in container `format`: MP4, WEBM or GIF.

    `is_cut`: the file is shorter than it says.
    """

    data: bytes
    format: str
    limits: settings.Video
    is_cut: bool = False


class Frames(msgspec.Struct, frozen=True, tag="frames"):
    """What the pixels are: for each frame (height, width, 3) bytes of RGB, in order of time.

    A frame is shown `seconds` after the first one, and to be rotated counterclockwise by
    `quarter_turns` times 90 degrees. `is_cut`: there was more, which is not whole.
    """

    width: int
    height: int
    seconds: tuple[float, ...]
    quarter_turns: tuple[int, ...]
    is_cut: bool


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The video can't be decoded; `reason` is for the client."""

    reason: str


_encoder = msgspec.msgpack.Encoder()
_job_decoder = msgspec.msgpack.Decoder(Job)
_decoder: msgspec.msgpack.Decoder[Frames | Refused] = msgspec.msgpack.Decoder(Frames | Refused)


def pack_job(job: Job) -> bytes:
    return _encoder.encode(job)


def unpack_job(job: bytearray) -> Job:
    return _job_decoder.decode(job)


def pack(frames: Frames | Refused, pixels: Sequence[bytes]) -> messages.Parts:
    return messages.described(sum(map(len, pixels)), pixels, _encoder.encode(frames))


def unpack(answer: bytearray) -> tuple[Frames | Refused, memoryview]:
    """Raises ValueError for what is no answer."""
    pixels, description = messages.split(answer)
    frames = _decoder.decode(description)
    if isinstance(frames, Frames):
        count = len(frames.seconds)
        if not count or len(frames.quarter_turns) != count:
            raise ValueError("frames without times")
        if len(pixels) != count * frames.height * frames.width * 3:
            raise ValueError("frames of another size")
    return frames, pixels
