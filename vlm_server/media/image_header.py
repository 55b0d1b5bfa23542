"""Reads the format and size from an image's header; decodes no pixels.

Pillow gets an explicit list of formats, so that no other decoder is ever tried on the bytes.
"""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from vlm_server.errors import InvalidImage
from vlm_server.media import image_bounds
from vlm_server.media.formats import not_readable

_FORMATS = (
    PngImagePlugin.PngImageFile.format,
    JpegImagePlugin.JpegImageFile.format,
    WebPImagePlugin.WebPImageFile.format,
    GifImagePlugin.GifImageFile.format,
)
_READABLE = ("PNG", "JPEG", "WebP", "GIF")
Image.MAX_IMAGE_PIXELS = None  # `limits.max_image_pixels` is checked below instead


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """`format` is PNG, JPEG, WEBP or GIF; the size is in pixels as stored, before rotation."""

    format: str
    width: int
    height: int


def read(data: bytes, param: str, max_pixels: int) -> ImageHeader:
    """The header of `data`. `param` names the content part in errors.

    Raises InvalidImage for another format, a header that can't be read, one that would take long
    to read, or more than `max_pixels`.
    """
    try:
        image_bounds.check(data)
    except image_bounds.TooMuch as error:
        raise InvalidImage(f"The image's file has too many {error}.", param) from None
    header = _open(data, param)
    if header.width * header.height > max_pixels:
        raise InvalidImage(
            f"The image has more than {max_pixels} pixels (limits.max_image_pixels).", param
        )
    return header


def _open(data: bytes, param: str) -> ImageHeader:
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            # Pillow calls a JPEG with a second image appended (many phones) an MPO.
            name = "JPEG" if image.format == "MPO" else str(image.format)
            return ImageHeader(name, image.width, image.height)
    except Exception:  # noqa: BLE001  Pillow's parsers raise almost anything on hostile bytes
        message = not_readable("image", _READABLE, data)
        raise InvalidImage(message, param) from None
