"""Checks that a PNG has all its rows.

Pillow decodes a PNG whose compressed data ends early, but properly, with black in the missing
rows: an answer about it would be about an image that nobody sent.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

_SIGNATURE_BYTES = 8
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""By colour type: grey, RGB, palette, grey with alpha, RGBA."""
_ADAM7 = (
    (0, 8, 0, 8),
    (4, 8, 0, 8),
    (0, 4, 4, 8),
    (2, 4, 0, 4),
    (0, 2, 2, 4),
    (1, 2, 0, 2),
    (0, 1, 1, 2),
)
"""First column, column step, first row, row step of each pass of an interlaced image."""
_STEP_BYTES = 1 << 20


def has_all_rows(data: bytes) -> bool:
    """Whether the compressed data of a PNG give every byte that its header asks for.

    Raises zlib.error or struct.error for data that can't be read at all.
    """
    width, height, depth, color_type, interlaced = struct.unpack_from(">IIBBxxB", data, 16)
    bits = _CHANNELS[color_type] * depth
    expected: int = sum(
        rows * (1 + (columns * bits + 7) // 8)  # each row begins with its filter's byte
        for columns, rows in _passes(width, height, bool(interlaced))
        if columns
    )
    inflater = zlib.decompressobj()
    for part in _compressed(data):
        while part and expected > 0:
            expected -= len(inflater.decompress(part, _STEP_BYTES))
            part = inflater.unconsumed_tail
    return expected <= 0


def _passes(width: int, height: int, interlaced: bool) -> Iterator[tuple[int, int]]:
    """(columns, rows) of each pass."""
    if not interlaced:
        yield width, height
        return
    for column, column_step, row, row_step in _ADAM7:
        yield -(-(width - column) // column_step), -(-(height - row) // row_step)


def _compressed(data: bytes) -> Iterator[bytes]:
    """The contents of the IDAT chunks."""
    position = _SIGNATURE_BYTES
    while position + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, position)
        if name == b"IDAT":
            yield data[position + 8 : position + 8 + length]
        position += 12 + length
