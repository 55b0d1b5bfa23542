"""Checks of a PNG that Pillow leaves out: completeness, and the transparent colour.

Pillow fills missing rows with black. Most images are complete if their last row is not black; the
data of others are inflated a second time and counted.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator, Sequence

from PIL import Image as PillowImage
from PIL import ImageChops
from PIL.PngImagePlugin import PngImageFile

_SIGNATURE_BYTES = 8
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Channels by colour type: grey, RGB, palette, grey with alpha, RGBA."""
_ADAM7 = [
    (0, 8, 0, 8), (4, 8, 0, 8), (0, 4, 4, 8), (2, 4, 0, 4), (0, 2, 2, 4), (1, 2, 0, 2), (0, 1, 1, 2)
]  # fmt: skip
"""First column, column step, first row, row step of each pass of an interlaced image."""
_STEP_BYTES = 1 << 20
_DEPTH = 24
"""The offset of the bits per channel in the header."""
_DEEP = 16
_LOWER_BYTES = "RGB;16L"


def is_covered(opened: PngImageFile) -> bool:
    """Whether the first frame covers all of the image; in an animation it may be smaller."""
    return all(tile.extents == (0, 0, *opened.size) for tile in opened.tile)


def match_depth(data: bytes, image: PngImageFile) -> None:
    """Convert the transparent colour to the depth of the decoded pixels.

    Pillow leaves it as in the file. 16-bit RGB is reduced to its upper bytes, so the image gets an
    alpha channel instead; 16-bit grey stays.
    """
    depth, color = data[_DEPTH], image.info.get("transparency")
    if isinstance(color, tuple) and depth == _DEEP:
        image.putalpha(_opacity(data, image, color))
        del image.info["transparency"]
    elif isinstance(color, int) and image.mode == "L":
        largest = (1 << depth) - 1
        image.info["transparency"] = (color & largest) * 255 // largest


def _opacity(data: bytes, upper: PngImageFile, transparent: tuple[int, ...]) -> PillowImage.Image:
    """An alpha channel: 0 where a 16-bit RGB image has the colour `transparent`, else 255.

    upper: the image as Pillow reads it, by upper bytes. Read in the other byte order, it has the
    lower ones.
    """
    others = _mark_other_colors(upper, [value >> 8 for value in transparent])
    if others.getextrema() != (255, 255):
        with PngImageFile(io.BytesIO(data)) as lower:
            lower.tile = [tile._replace(args=_LOWER_BYTES) for tile in lower.tile]
            lower.load()
            others = ImageChops.lighter(
                others, _mark_other_colors(lower, [value & 0xFF for value in transparent])
            )
    return others


def _mark_other_colors(image: PillowImage.Image, color: Sequence[int]) -> PillowImage.Image:
    """255 where an RGB image has another colour than `color`, else 0."""
    table = [0 if level == value else 255 for value in color for level in range(256)]
    red, green, blue = image.point(table).split()
    return ImageChops.lighter(ImageChops.lighter(red, green), blue)


def has_all_rows(data: bytes, image: PngImageFile) -> bool:
    """Whether the compressed data of a PNG have every byte that its header asks for.

    loaded: the image decoded by Pillow. Raises zlib.error or struct.error for unreadable data.
    """
    return _shows_its_last_row(image) or _counts_all_rows(data)


def _shows_its_last_row(image: PngImageFile) -> bool:
    """Whether the last row is not black, as missing ones are.

    False for interlaced images, with rows in another order, and animated ones, with more data.
    """
    if image.info.get("interlace") or image.is_animated:
        return False
    width, height = image.size
    return image.crop((0, height - 1, width, height)).getbbox(alpha_only=False) is not None


def _counts_all_rows(data: bytes) -> bool:
    """`has_all_rows`, by inflating all data."""
    width, height, depth, color_type, interlaced = struct.unpack_from(">IIBBxxB", data, 16)
    bits = _CHANNELS[color_type] * depth
    expected_bytes: int = sum(
        rows * (1 + (columns * bits + 7) // 8)  # each row begins with its filter's byte
        for columns, rows in _passes(width, height, bool(interlaced))
        if columns
    )
    inflater = zlib.decompressobj()
    for part in _idat_contents(data):
        while part and expected_bytes > 0:
            expected_bytes -= len(inflater.decompress(part, _STEP_BYTES))
            part = inflater.unconsumed_tail
    return expected_bytes <= 0


def _passes(width: int, height: int, interlaced: bool) -> Iterator[tuple[int, int]]:
    """(columns, rows) of each pass."""
    for column, column_step, row, row_step in _ADAM7 if interlaced else [(0, 1, 0, 1)]:
        yield -(-(width - column) // column_step), -(-(height - row) // row_step)


def _idat_contents(data: bytes) -> Iterator[bytes]:
    """The contents of the IDAT chunks."""
    position = _SIGNATURE_BYTES
    while position + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, position)
        if name == b"IDAT":
            yield data[position + 8 : position + 8 + length]
        position += 12 + length
