"""Bounds on the parts of an image's file besides its pixels.

Pillow 13 does much work for each chunk, segment, block and stray byte: files of 10 to 20 MB (10,000
color profiles, 1.7 million empty chunks, fill bytes) keep it busy for 5 seconds to minutes,
while all clients' images wait for a process. This walk looks only at lengths, takes a tenth of a
second, and stops at the first part beyond a bound; files that pass are read and decoded in time
proportional to their bytes and pixels. Damaged files pass, too: readers refuse them.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections import Counter

MAX_CHUNKS = 20_000
"""Chunks of a PNG or WebP. libpng writes the pixels of 20 MiB in about 2,500 chunks."""
MAX_EXTRA_CHUNKS = 256
"""Chunks of a PNG without pixels."""
MAX_INFLATED_CHUNKS = 16
"""Texts and colour profiles of a PNG, each of which may inflate to 1 MiB."""
MAX_SEGMENTS = 1_000
"""Segments of a JPEG before its pixels. 20 MiB of them are 320 segments."""
MAX_LISTED_SEGMENTS = 16
"""EXIF and Photoshop segments of a JPEG, which are lists themselves."""
MAX_SCANS = 100
"""Scans of a JPEG. Each covers all its pixels; encoders write up to about 15."""
MAX_STRAY_BYTES = 4096
"""Fill bytes and bytes outside of any part."""
MAX_FILL_RUN_BYTES = 64 << 10
"""Fill bytes in a row between the pixels of a JPEG."""
MAX_BLOCKS = 20_000
"""Blocks of a GIF before its first frame."""
MAX_NUMBERS = 200_000
"""Numbers in an entry of a TIFF: each strip of pixels has its place and its length in two."""
MAX_EXIF_BYTES = 1 << 20
MAX_EXIF_ENTRIES = 6_000
"""EXIF entries: more than fit into a JPEG's segment of 64 KiB, and read in 50 ms."""
MAX_EXIF_VALUE_BYTES = 16 << 20
"""Bytes in all EXIF entries: entries may share bytes, which are copied for each."""

_MARKER = re.compile(rb"\xff[^\x00\xff]")
_SCAN_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_FILL_RUN = b"\xff" * MAX_FILL_RUN_BYTES
_RAW_PROFILE = b"Raw profile type exif\0"
_NO_LENGTH = frozenset({0x01, *range(0xD0, 0xDA), *range(0xF0, 0xFE)})
"""JPEG markers after which Pillow expects no length."""
_APP1, _APP13, _SOI, _SOS, _EOI = 0xE1, 0xED, 0xD8, 0xDA, 0xD9
_EXIF_TYPE_BYTES = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8, 8, 8)


class TooMuch(Exception):
    """A file exceeds a bound; the message names it."""


def check(data: bytes) -> None:
    """Raises TooMuch for a PNG, JPEG, WebP, GIF or TIFF; other files pass."""
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        _check_png(data)
    elif data[:2] == b"\xff\xd8":
        _check_jpeg(data)
    elif data[:4] == b"RIFF":
        _check_webp(data)
    elif data[:4] == b"GIF8":
        _check_gif(data)
    elif data[:4] in (b"II*\0", b"MM\0*"):
        _check_directory(data, len(data) + MAX_EXIF_VALUE_BYTES, MAX_NUMBERS)


def _check_png(data: bytes) -> None:
    position, counts = 8, Counter[str]()
    while position + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, position)
        _count(counts, "chunks", MAX_CHUNKS)
        if name == b"IEND":
            return
        if name not in (b"IDAT", b"fdAT", b"fcTL"):
            _count(counts, "chunks without pixels", MAX_EXTRA_CHUNKS)
            start = position + 8
            _check_png_extra(name, memoryview(data)[start : start + length], counts)
        position += 12 + length


def _check_png_extra(name: bytes, content: memoryview, counts: Counter[str]) -> None:
    if name in (b"iCCP", b"zTXt", b"iTXt"):
        _count(counts, "compressed chunks", MAX_INFLATED_CHUNKS)
    if name == b"eXIf":
        _check_exif(content)
    elif name in (b"tEXt", b"zTXt") and bytes(content[: len(_RAW_PROFILE)]) == _RAW_PROFILE:
        _check_raw_profile(content[len(_RAW_PROFILE) :], is_deflated=name == b"zTXt")


def _check_raw_profile(content: memoryview, *, is_deflated: bool) -> None:
    """Check EXIF in hexadecimal digits after three lines of other text, a form of ImageMagick's."""
    limit = 2 * MAX_EXIF_BYTES
    try:
        text = (
            zlib.decompressobj().decompress(content[1:], limit + 1)
            if is_deflated
            else bytes(content[: limit + 1])
        )
        if len(text) > limit:
            raise TooMuch("bytes or entries of EXIF")
        _check_exif(memoryview(bytes.fromhex(text.split(b"\n", 3)[-1].decode("ascii"))))
    except (zlib.error, ValueError):
        return


def _check_jpeg(data: bytes) -> None:
    position, stray, counts = 2, 0, Counter[str]()
    while match := _MARKER.search(data, position):
        stray += match.start() - position
        if stray > MAX_STRAY_BYTES:
            raise TooMuch("fill bytes")
        _count(counts, "segments", MAX_SEGMENTS)
        marker, position = data[match.end() - 1], match.end()
        if marker == _SOS:
            _check_scans(data, position)
            return
        if marker in _NO_LENGTH:
            continue
        length = int.from_bytes(data[position : position + 2])
        content = memoryview(data)[position + 2 : position + length]
        if marker == _APP13 or (marker == _APP1 and bytes(content[:6]) == b"Exif\0\0"):
            _count(counts, "EXIF or Photoshop segments", MAX_LISTED_SEGMENTS)
            _check_exif(content)
        position += max(length, 2)
    if len(data) - position > MAX_STRAY_BYTES:
        raise TooMuch("fill bytes")


def _check_scans(data: bytes, position: int) -> None:
    """Check from the first scan's marker to the end of the image; the rest is not read."""
    run = data.find(_FILL_RUN, position)
    limit = len(data) if run < 0 else run + 2
    counts = Counter(scans=1)
    while match := _SCAN_MARKER.search(data, position, limit):
        marker, position = data[match.end() - 1], match.end()
        if marker in (_SOI, _EOI):
            return
        _count(counts, "segments", MAX_SEGMENTS)
        if marker == _SOS:
            _count(counts, "scans", MAX_SCANS)
        elif marker not in _NO_LENGTH:
            position += int.from_bytes(data[position : position + 2])
    if run >= 0:
        raise TooMuch("fill bytes")


def _check_webp(data: bytes) -> None:
    position, counts = 12, Counter[str]()
    while position + 8 <= len(data):
        name, length = struct.unpack_from("<4sI", data, position)
        _count(counts, "chunks", MAX_CHUNKS)
        if name == b"EXIF":
            _check_exif(memoryview(data)[position + 8 : position + 8 + length])
        position += 8 + length + (length & 1)


def _check_gif(data: bytes) -> None:
    """Check up to the first frame, the only one that is read."""
    position, stray, counts = 13, 0, Counter[str]()
    if len(data) > 10 and data[10] & 0x80:
        position += 3 << (data[10] & 7) + 1
    while position < len(data) and data[position : position + 1] not in (b",", b";"):
        if data[position] != 0x21:
            stray += 1
            if stray > MAX_STRAY_BYTES:
                raise TooMuch("stray bytes")
            position += 1
            continue
        _count(counts, "blocks", MAX_BLOCKS)
        position += 2
        while position < len(data) and (length := data[position]):
            _count(counts, "blocks", MAX_BLOCKS)
            position += 1 + length
        position += 1


def _check_exif(exif: memoryview) -> None:
    """Check the first directory of EXIF, the only one that is read."""
    if len(exif) > MAX_EXIF_BYTES:
        raise TooMuch("bytes or entries of EXIF")
    _check_directory(bytes(exif).removeprefix(b"Exif\0\0"), MAX_EXIF_VALUE_BYTES)


def _check_directory(tiff: bytes, max_bytes: int, max_numbers: float = math.inf) -> None:
    """Check the first directory of a TIFF: bytes of all its values, numbers in each."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    if order is None or len(tiff) < 8:
        return
    (start,) = struct.unpack_from(order + "I", tiff, 4)
    if start + 2 > len(tiff):
        return
    (num_entries,) = struct.unpack_from(order + "H", tiff, start)
    num_bytes = 0
    for index in range(min(num_entries, (len(tiff) - start - 2) // 12)):
        kind, count = struct.unpack_from(order + "xxHI", tiff, start + 2 + 12 * index)
        unit_bytes = _EXIF_TYPE_BYTES[kind] if kind < len(_EXIF_TYPE_BYTES) else 0
        num_bytes += min(unit_bytes * count, len(tiff))
        if index >= MAX_EXIF_ENTRIES or num_bytes > max_bytes:
            raise TooMuch("bytes or entries of EXIF")
        if unit_bytes > 1 and count > max_numbers:
            raise TooMuch("strips or numbers")


def _count(counts: Counter[str], subject: str, limit: int) -> None:
    counts[subject] += 1
    if counts[subject] > limit:
        raise TooMuch(subject)
