"""Pictures that cost whoever decodes them."""

from __future__ import annotations

import io
import struct

from PIL import Image as PillowImage

_END, _SCAN = 0xD9, 0xDA


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


def large_png(side_pixels: int, colour: int) -> bytes:
    """A plain RGB picture that differs from those of other colours, small when it is sent."""
    buffer = io.BytesIO()
    rgb = (colour >> 16 & 255, colour >> 8 & 255, colour & 255)
    PillowImage.new("RGB", (side_pixels, side_pixels), rgb).save(buffer, "PNG")
    return buffer.getvalue()


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
