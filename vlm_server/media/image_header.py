"""What a picture's header says. Knows four formats; decodes no pixel.

Pillow is given an explicit list of formats, so the bytes alone decide what a picture is,
and no other decoder is ever tried on them.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from vlm_server.errors import InvalidImage

_FORMATS = (
    PngImagePlugin.PngImageFile.format,
    JpegImagePlugin.JpegImageFile.format,
    WebPImagePlugin.WebPImageFile.format,
    GifImagePlugin.GifImageFile.format,
)
Image.MAX_IMAGE_PIXELS = None  # the limit is the settings', held against the header below
_NOT_READABLE = "The picture is not a readable PNG, JPEG, WebP or GIF."


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """`format` is PNG, JPEG, WEBP or GIF; the size is in pixels as stored, before rotation."""

    format: str
    width: int
    height: int


def read(data: bytes, param: str, max_pixels: int) -> ImageHeader:
    """What the header of `data` says. `param` names the part in errors.

    Raises InvalidImage for another format, a header that can't be read, and more than
    `max_pixels`.
    """
    header = _open(data, param)
    if header.width * header.height > max_pixels:
        raise InvalidImage(f"The picture has more than {max_pixels} pixels.", param)
    return header


def _open(data: bytes, param: str) -> ImageHeader:
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            # A JPEG with a second picture in its tail (many phones) is an MPO to Pillow.
            name = "JPEG" if image.format == "MPO" else str(image.format)
            return ImageHeader(name, image.width, image.height)
    except Exception:  # noqa: BLE001  Pillow's parsers raise almost anything on hostile bytes
        raise InvalidImage(_NOT_READABLE, param) from None
