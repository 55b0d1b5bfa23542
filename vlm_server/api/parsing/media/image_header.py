"""The format and size of an image, read from its header; Pillow may try the listed formats only."""

from __future__ import annotations

import io
from dataclasses import dataclass
from importlib.util import find_spec

from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from vlm_server.api.parsing.media import heif_header, image_bounds
from vlm_server.api.parsing.media.formats import unreadable_message
from vlm_server.errors import InvalidImage

_FORMATS = (
    PngImagePlugin.PngImageFile.format,
    JpegImagePlugin.JpegImageFile.format,
    WebPImagePlugin.WebPImageFile.format,
    GifImagePlugin.GifImageFile.format,
    BmpImagePlugin.BmpImageFile.format,
)
_TIFF = (TiffImagePlugin.TiffImageFile.format,)
_TIFF_STARTS = (b"II*\0", b"MM\0*")
"""The starts of accepted TIFFs; Pillow's others have directories of another form."""
_HAS_HEIC = find_spec("pillow_heif") is not None
READABLE = ("PNG", "JPEG", "WebP", "GIF", "AVIF", "BMP", "TIFF", *(("HEIC",) if _HAS_HEIC else ()))
_NO_HEIC = (
    "The image is HEIC, which this server can't read: send it as JPEG, or install the extra `heic` "
    "(scripts/setup heic in a clone, else install again with vlm-server[heic])."
)
Image.MAX_IMAGE_PIXELS = None  # `limits.max_image_pixels` is checked below instead


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """`format` is PNG, JPEG, WEBP, GIF, BMP, TIFF, AVIF or HEIC; the size is in pixels.

    The size is before rotation, except in TIFF. In HEIC and AVIF it is an upper bound on pixels.
    """

    format: str
    width: int
    height: int


def read(data: bytes, param: str, max_pixels: int) -> ImageHeader:
    """The header of `data`. Raises InvalidImage, naming `param`, also beyond `max_pixels`."""
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
        if name := heif_header.brand(data):
            if name == "HEIC" and not _HAS_HEIC:
                raise InvalidImage(_NO_HEIC, param)
            return ImageHeader(name, *heif_header.size(data))
        formats = _TIFF if data.startswith(_TIFF_STARTS) else _FORMATS
        with Image.open(io.BytesIO(data), formats=formats) as image:
            # For Pillow, a JPEG with a second image appended (many phones) is an MPO.
            name = "JPEG" if image.format == "MPO" else str(image.format)
            return ImageHeader(name, image.width, image.height)
    except InvalidImage:
        raise
    except Exception:  # noqa: BLE001  Pillow's parsers raise almost anything on hostile bytes
        raise InvalidImage(unreadable_message("image", READABLE, data), param) from None
