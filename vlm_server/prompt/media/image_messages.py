"""The messages between a preparer thread and the process that decodes images.

A job is a `protocol.Image` as msgpack. The answer is the pixels, described by `Pixels`; or none,
described by `Refused`.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from PIL import Image as PillowImage

from vlm_server.platform.child import messages
from vlm_server.protocol import Image

_BAND_PIXELS = 1 << 18


class Pixels(msgspec.Struct, frozen=True, tag="pixels"):
    """The pixels are (height, width, 3) bytes of RGB."""

    width: int
    height: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The image can't be decoded; `reason` is for the client."""

    reason: str


_encoder = msgspec.msgpack.Encoder()
_job_decoder = msgspec.msgpack.Decoder(Image)
_decoder: msgspec.msgpack.Decoder[Pixels | Refused] = msgspec.msgpack.Decoder(Pixels | Refused)


def pack_job(image: Image) -> bytes:
    return _encoder.encode(image)


def unpack_job(job: bytearray) -> Image:
    return _job_decoder.decode(job)


def pack(decoded: PillowImage.Image) -> messages.Parts:
    size = decoded.width * decoded.height * 3
    description = _encoder.encode(Pixels(decoded.width, decoded.height))
    return messages.described(size, _bands(decoded), description)


def pack_refusal(reason: str) -> messages.Parts:
    return messages.described(0, (), _encoder.encode(Refused(reason)))


def unpack(answer: bytearray) -> tuple[Pixels, memoryview] | Refused:
    """The pixels, which are a part of `answer`.

    Raises ValueError or msgspec.DecodeError for what is no answer.
    """
    pixels, description = messages.split(answer)
    told = _decoder.decode(description)
    if isinstance(told, Refused):
        return told
    if told.width < 1 or len(pixels) != told.width * told.height * 3:
        raise ValueError("an image of another size")
    return told, pixels


def _bands(image: PillowImage.Image) -> Iterator[bytes]:
    """The pixels of `image`, some rows at a time."""
    rows = max(1, _BAND_PIXELS // image.width)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        yield image.crop((0, top, image.width, bottom)).tobytes()
