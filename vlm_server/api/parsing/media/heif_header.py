"""The size of a HEIC or AVIF image, from its boxes alone (ISO/IEC 14496-12, 23008-12)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_AVIF = frozenset({b"avif", b"avis"})
_HEIC = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx"})
_MAX_BOXES = 20_000


class NotRead(Exception):
    """The boxes give no size."""


def brand(data: bytes) -> str | None:
    """AVIF or HEIC by the first box of `data`, if any."""
    if data[4:8] != b"ftyp":
        return None
    end = min(int.from_bytes(data[:4]), 256)
    brands = {data[8:12], *(data[at : at + 4] for at in range(16, end - 3, 4))}
    return "AVIF" if brands & _AVIF else "HEIC" if brands & _HEIC else None


def size(data: bytes) -> tuple[int, int]:
    """Width and height of the largest image described, before rotation and clipping.

    No decoded image has more pixels, even if it is a grid of images. Raises NotRead.
    """
    boxes_left = iter(range(_MAX_BOXES))
    try:
        (meta,) = _boxes(data, (0, len(data)), b"meta", boxes_left)
        (properties,) = _boxes(data, (meta[0] + 4, meta[1]), b"iprp", boxes_left)
        (container,) = _boxes(data, properties, b"ipco", boxes_left)
        sizes = [
            struct.unpack_from(">II", data, start + 4)
            for start, _ in _boxes(data, container, b"ispe", boxes_left)
        ]
    except (ValueError, struct.error):
        raise NotRead from None
    largest = max(sizes, key=lambda each: each[0] * each[1], default=(0, 0))
    if not all(largest):
        raise NotRead
    return largest[0], largest[1]


def _boxes(
    data: bytes, span: tuple[int, int], name: bytes, boxes_left: Iterator[int]
) -> Iterator[tuple[int, int]]:
    """(start, end) of the content of each box `name` in `span`; each takes one of `boxes_left`."""
    position, end = span
    while position + 8 <= end:
        length, kind = struct.unpack_from(">I4s", data, position)
        start = position + 8
        if length == 1:
            (length,) = struct.unpack_from(">Q", data, start)
            start += 8
        length = length or end - position  # 0: to the end
        if length < start - position or position + length > end or next(boxes_left, None) is None:
            raise NotRead
        if kind == name:
            yield start, position + length
        position += length
