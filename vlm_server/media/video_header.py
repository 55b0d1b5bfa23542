"""Reads a video's container format and checks that the file is complete; decodes nothing.

A truncated file is refused here, by the sizes that its own boxes declare: decoders would show
what is left of it as if it were the whole video.
"""

from __future__ import annotations

from vlm_server.errors import InvalidVideo
from vlm_server.media.formats import not_readable

_READABLE = ("MP4", "MOV", "WebM", "Matroska", "GIF")
_EBML = b"\x1a\x45\xdf\xa3"
_SEGMENT = b"\x18\x53\x80\x67"
_DOCUMENT_TYPES = (b"webm", b"matroska")
_GIF_SIGNATURES = (b"GIF87a", b"GIF89a")
_GIF_TRAILER = b";"
_HEADER_BYTES = 4096
_MAX_BOXES = 100_000


def read(data: bytes, param: str) -> str:
    """MP4 (or MOV), WEBM (or Matroska) or GIF. `param` names the content part in errors.

    Raises InvalidVideo for another format and for a truncated file.
    """
    if data[:6] in _GIF_SIGNATURES:
        name, whole = "GIF", data.rstrip(b"\0").endswith(_GIF_TRAILER)
    elif data[4:8] == b"ftyp":
        name, whole = "MP4", _boxes_fit(data)
    elif data[:4] == _EBML and any(kind in data[:64] for kind in _DOCUMENT_TYPES):
        name, whole = "WEBM", _segment_fits(data)
    else:
        message = not_readable("video", _READABLE, data)
        raise InvalidVideo(message, param)
    if not whole:
        raise InvalidVideo(f"The {name} video is truncated.", param)
    return name


def _boxes_fit(data: bytes) -> bool:
    """Whether each box of an MP4 file lies within it, and one of them is its index."""
    position, has_index = 0, False
    for _ in range(_MAX_BOXES):
        if position + 8 > len(data):
            break
        size = int.from_bytes(data[position : position + 4])
        has_index = has_index or data[position + 4 : position + 8] == b"moov"
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16])
        if size == 0:  # the last box, to the end of the file
            return has_index
        if size < 8:
            return False
        position += size
    return has_index and position <= len(data)


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
