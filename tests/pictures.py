"""Pictures that are expensive to decode."""

from __future__ import annotations

import io
import struct
import zlib
from functools import cache

from PIL import Image as PillowImage

_END, _SCAN = 0xD9, 0xDA
_PNG_HEADER_BYTES = 33


def slow_jpeg(side_pixels: int, num_scans: int) -> bytes:
    """A progressive JPEG whose last scan, of few bytes, comes again and again.

    Each takes the decoder as long as going through all of the picture.
    """
    buffer = io.BytesIO()
    grey = PillowImage.new("L", (side_pixels, side_pixels), 128)
    grey.save(buffer, "JPEG", progressive=True)
    whole = buffer.getvalue()
    head, scan = whole[:-2], _last_scan(whole)
    return head + scan * num_scans + whole[-2:]


def heic(picture: PillowImage.Image, **options: object) -> bytes:
    """As phones take them; Pillow itself can't write it."""
    import pillow_heif

    buffer = io.BytesIO()
    pillow_heif.from_pillow(picture).save(buffer, format="HEIF", **options)
    return buffer.getvalue()


@cache
def large_png(side_pixels: int) -> bytes:
    """A plain RGB picture, small when it is sent."""
    buffer = io.BytesIO()
    PillowImage.new("RGB", (side_pixels, side_pixels)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def other_png(png: bytes, number: int) -> bytes:
    """The same pixels in other bytes, for each number: no cache knows it."""
    body = b"tEXtnumber\0%d" % number
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return png[:_PNG_HEADER_BYTES] + chunk + png[_PNG_HEADER_BYTES:]


def other_jpeg(jpeg: bytes, number: int) -> bytes:
    """The same pixels in other bytes, for each number: no cache knows it."""
    return jpeg[:2] + b"\xff\xfe\0\6" + struct.pack(">I", number) + jpeg[2:]


def _last_scan(jpeg: bytes) -> bytes:
    position, found = 2, b""
    while jpeg[position + 1] != _END:
        kind = jpeg[position + 1]
        end = position + 2 + struct.unpack_from(">H", jpeg, position + 2)[0]
        if kind == _SCAN:
            while jpeg[end] != 0xFF or jpeg[end + 1] == 0:
                end += 1
            found = jpeg[position:end]
        position = end
    return found
