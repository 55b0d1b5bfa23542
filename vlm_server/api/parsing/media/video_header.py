"""A video's container format, and whether its file is complete; nothing is decoded.

Completeness follows from the declared sizes of boxes: decoders would show a truncated file as if it
were the whole video.
"""

from __future__ import annotations

from dataclasses import dataclass

from vlm_server.api.parsing.media.formats import unreadable_message
from vlm_server.errors import InvalidVideo

_READABLE = ("MP4", "MOV", "WebM", "Matroska", "GIF")
_EBML = b"\x1a\x45\xdf\xa3"
_SEGMENT = b"\x18\x53\x80\x67"
_DOCUMENT_TYPES = (b"webm", b"matroska")
_GIF_SIGNATURES = (b"GIF87a", b"GIF89a")
_GIF_TRAILER = b";"
_HEADER_BYTES = 4096
_MAX_BOXES = 100_000


@dataclass(frozen=True, slots=True)
class VideoHeader:
    """`format` is MP4 (or MOV), WEBM (or Matroska) or GIF; `is_cut`: the file's end is missing."""

    format: str
    is_cut: bool


def read(data: bytes, param: str) -> VideoHeader:
    """The header of `data`. Raises InvalidVideo, naming `param`, also without an MP4's index."""
    if data[:6] in _GIF_SIGNATURES:
        return VideoHeader("GIF", not data.rstrip(b"\0").endswith(_GIF_TRAILER))
    if data[4:8] == b"ftyp":
        return VideoHeader("MP4", not _boxes_fit(data, param))
    if data[:4] == _EBML and any(kind in data[:64] for kind in _DOCUMENT_TYPES):
        return VideoHeader("WEBM", not _segment_fits(data))
    raise InvalidVideo(unreadable_message("video", _READABLE, data), param)


def _boxes_fit(data: bytes, param: str) -> bool:
    """Whether each box of an MP4 file lies within it. Raises InvalidVideo if none is its index."""
    position, has_index, fit = 0, False, True
    for _ in range(_MAX_BOXES):
        if position + 8 > len(data):
            break
        size = int.from_bytes(data[position : position + 4])
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16])
        is_last = size == 0  # to the end of the file
        fit = is_last or 8 <= size <= len(data) - position
        has_index = has_index or (fit and data[position + 4 : position + 8] == b"moov")
        if is_last or not fit:
            break
        position += size
    if not has_index:
        raise InvalidVideo("The MP4 video is truncated: it has no index (`moov`).", param)
    return fit


def _segment_fits(data: bytes) -> bool:
    """Whether a WebM file contains the whole segment it declares; a live stream has no size."""
    start = data.find(_SEGMENT, 0, _HEADER_BYTES)
    if start < 0 or start + 4 >= len(data):
        return False
    position = start + len(_SEGMENT)
    num_bytes = 9 - data[position].bit_length()
    if num_bytes > 8:
        return False
    marker = 1 << 7 * num_bytes
    size = int.from_bytes(data[position : position + num_bytes]) - marker
    is_unknown = size == marker - 1
    return is_unknown or position + num_bytes + size <= len(data)
