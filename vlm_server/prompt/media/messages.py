"""The messages between a preparer thread and a process that decodes an image or a video.

A job is a `protocol.Image` or a `VideoJob` as msgpack. The answer is `Frames` with all pixels, or
`Undecodable`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from vlm_server import settings
from vlm_server.platform.child import messages
from vlm_server.protocol import Video


class VideoJob(msgspec.Struct, frozen=True):
    """A video to decode, within limits; see `sampling.frame_size` about `factor`."""

    video: Video
    limits: settings.VideoSettings
    factor: int = 1


class Frames(msgspec.Struct, frozen=True, tag="frames"):
    """The shape of the pixels: (frames, height, width, 3) bytes of RGB. An image is one frame.

    seconds: the time of each, from the first on. quarter_turns: the counterclockwise rotation of
    each by 90 degrees. is_cut: whether the file is truncated.
    """

    width: int
    height: int
    seconds: tuple[float, ...] = (0.0,)
    quarter_turns: tuple[int, ...] = (0,)
    is_cut: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.seconds) * self.height * self.width * 3


class Undecodable(msgspec.Struct, frozen=True, tag="undecodable"):
    """The image or video can't be decoded; `reason` is for the client."""

    reason: str


Description = Frames | Undecodable
_decoder: msgspec.msgpack.Decoder[Description] = msgspec.msgpack.Decoder(Description)


def pack(description: Description, pixels: Iterable[bytes] = ()) -> messages.Parts:
    """An answer: `unpack` returns its parts."""
    size = description.num_bytes if isinstance(description, Frames) else 0
    return messages.describe(size, pixels, msgspec.msgpack.encode(description))


def unpack(answer: bytearray) -> tuple[Description, memoryview]:
    """The description of the pixels, and the pixels, a part of `answer`. Raises ValueError."""
    pixels, description = messages.split(answer)
    frames = _decoder.decode(description)
    if isinstance(frames, Frames):
        if not frames.seconds or len(frames.quarter_turns) != len(frames.seconds):
            raise ValueError("frames without times")
        if frames.width < 1 or len(pixels) != frames.num_bytes:
            raise ValueError("frames of another size")
    return frames, pixels
