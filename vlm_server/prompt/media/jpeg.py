"""Checks that a JPEG has all its pixels.

Where the compressed data end early, but properly, libjpeg goes on with blocks of middle grey, and
with coarse ones where a progressive image had finer scans to come: Pillow does not tell. What is
left over before the end is skipped. So bytes that are put there change an image that lacks some.
"""

from __future__ import annotations

import io

from PIL.JpegImagePlugin import JpegImageFile

_END = b"\xff\xd9"
_MORE = b"\xa5" * 64
_GREY = frozenset({127, 128})
"""127 is how CMYK, which is inverted, has it."""
_ROWS = 256
"""Of a band: what is compared at once, so that there are no copies of all pixels."""


def has_all_blocks(data: bytes, loaded: JpegImageFile) -> bool:
    """Whether the compressed data of a JPEG reach its last block; what that lacks may go unseen.

    `loaded`: what Pillow has read of it. Most images show by their last pixel that they are whole;
    only others, and progressive ones, are decoded a second time.
    """
    width, height = loaded.size
    last = loaded.getpixel((width - 1, height - 1))
    is_grey = _GREY.issuperset(last if isinstance(last, tuple) else (last,))
    end = data.rfind(_END)
    if end < 0 or not (is_grey or loaded.info.get("progressive")):
        return True
    bands = [(0, top, width, min(top + _ROWS, height)) for top in range(0, height, _ROWS)]
    try:
        with JpegImageFile(io.BytesIO(data[:end] + _MORE + data[end:])) as longer:
            return all(longer.crop(band).tobytes() == loaded.crop(band).tobytes() for band in bands)
    except OSError:
        return True  # which says nothing about the image without them
