"""A frame of a camera or a screen: its header, and the thumbnail that shows whether it changed.

`read` runs in a process that can be killed, which is this module as a program (arguments: bytes of
address space, CPU seconds of a frame, pixels of a frame; a job is a frame's bytes). `changed_share`
runs anywhere.
"""

from __future__ import annotations

import hashlib
import io
import sys
import warnings

from msgspec import Struct
from PIL import Image, ImageChops

from vlm_server.api.outcomes import serve_outcomes
from vlm_server.api.parsing.media import heif_header, image_header
from vlm_server.errors import InvalidImage
from vlm_server.platform.child.serve import ChildLimits

SIDE = 64
"""Width and height of a thumbnail, whatever the frame's shape."""
_PARAM = "frame"
_RETIRE_BYTES = 256 << 20


class FrameFacts(Struct, frozen=True, tag=True):
    """What is known of a frame: its header, the SHA-256 of its bytes in hex, and its thumbnail.

    thumbnail: (SIDE, SIDE, 3) bytes of RGB.
    """

    format: str
    width: int
    height: int
    content_hash: str
    thumbnail: bytes


def read(data: bytes, max_pixels: int) -> FrameFacts:
    """The facts of a frame in any format but HEIC and AVIF. Raises InvalidImage."""
    if heif_header.brand(data):
        raise InvalidImage("Frames must be JPEG, PNG, WebP, GIF, BMP or TIFF.", _PARAM)
    header = image_header.read(data, _PARAM, max_pixels)
    return FrameFacts(
        format=header.format,
        width=header.width,
        height=header.height,
        content_hash=hashlib.sha256(data).hexdigest(),
        thumbnail=_thumbnail(data, header.format),
    )


def changed_share(before: bytes, after: bytes, pixel_change: int) -> float:
    """The share of pixels, 0 to 1, of which a colour differs by more than `pixel_change` of 255.

    before, after: thumbnails. Colours count, since a red light is as bright as a green one.
    """
    old, new = (Image.frombytes("RGB", (SIDE, SIDE), each) for each in (before, after))
    red, green, blue = ImageChops.difference(old, new).split()
    largest = ImageChops.lighter(ImageChops.lighter(red, green), blue)
    return sum(largest.histogram()[pixel_change + 1 :]) / (SIDE * SIDE)


def _thumbnail(data: bytes, name: str) -> bytes:
    """Raises InvalidImage. A JPEG is decoded at an eighth of its size, if that is large enough."""
    try:
        with Image.open(io.BytesIO(data), formats=(name,)) as image:
            image.draft("RGB", (SIDE, SIDE))
            small = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)
            return small.tobytes()
    except Exception:  # noqa: BLE001  Pillow's decoders raise almost anything on hostile bytes
        raise InvalidImage(f"The {name} frame can't be decoded.", _PARAM) from None


def main(memory_bytes: str, job_seconds: str, max_pixels: str) -> None:
    warnings.simplefilter("ignore")  # Pillow's, about clients' images, would fill the log
    serve_outcomes(
        lambda job: read(bytes(job), int(max_pixels)),
        ChildLimits(int(memory_bytes), float(job_seconds), _RETIRE_BYTES),
        InvalidImage("Decoding the frame takes too much memory.", _PARAM),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
