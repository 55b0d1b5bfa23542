"""The check that a JPEG has all its pixels.

libjpeg fills missing blocks silently when a scan ends early or is missing. We walk the markers up
to the end of the image: they say which coefficients and restart intervals are there. Whether
scans are complete is tested with bytes appended to them: these change an incomplete image.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field

from PIL.JpegImagePlugin import JpegImageFile

_MARKER = re.compile(rb"\xff[^\x00\xff]")
_SCAN_END = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_RESTART = re.compile(rb"\xff[\xd0-\xd7]")
_SOI, _EOI, _SOS, _DRI = 0xD8, 0xD9, 0xDA, 0xDD
_NO_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})
_BLOCK = 8
_COEFFICIENTS = 64
_MORE = b"\xa5" * 64
_GREY_LUMA = 126.0, 129.5
"""The brightness of a missing block: about 128, or 127 in CMYK, which is inverted."""
_ROWS = 256
"""The height of the bands in which images are compared, without a copy of all pixels."""


def has_all_blocks(data: bytes, image: JpegImageFile) -> bool:
    """Whether a JPEG has all scans, up to their last block. loaded: the image decoded by Pillow.

    Most images of one scan show it by their last pixel; others are decoded a second time.
    """
    walk = _Walk(image)
    walk.run(data)
    if not walk.has_all_coefficients:
        return False
    return (len(walk.scan_ends) == 1 and not _ends_grey(image)) or _uses_no_more(
        _lengthen_scans(data, walk.scan_ends), image
    )


@dataclass(slots=True)
class _Component:
    """missing_bits: by coefficient, the number of low bits in no scan yet; None: all."""

    horizontal: int
    vertical: int
    missing_bits: list[int | None] = field(default_factory=lambda: [None] * _COEFFICIENTS)


class _Walk:
    """A walk along the markers of a JPEG, from its start to its own end."""

    def __init__(self, image: JpegImageFile) -> None:
        self.scan_ends: list[int] = []
        """The end of the compressed data of each scan."""
        self._components = {name: _Component(h, v) for name, h, v, _ in image.layer}
        self._size = image.size
        self._is_progressive = "progressive" in image.info
        self._restart_interval = 0
        self._lacks_restarts = False

    @property
    def has_all_coefficients(self) -> bool:
        """Whether the scans cover every bit of all coefficients; their data may be incomplete."""
        bits = [bit for component in self._components.values() for bit in component.missing_bits]
        return not self._lacks_restarts and all(bit == 0 for bit in bits)

    def run(self, data: bytes) -> None:
        position = 2
        while match := _MARKER.search(data, position):
            marker, position = data[match.end() - 1], match.end()
            if marker in (_EOI, _SOI):
                return
            if marker in _NO_LENGTH:
                continue
            length = int.from_bytes(data[position : position + 2])
            content = data[position + 2 : position + length]
            position += max(length, 2)
            if marker == _DRI:
                self._restart_interval = int.from_bytes(content[:2])
            elif marker == _SOS:
                position = self._take_scan(content, data, position)

    def _take_scan(self, content: bytes, data: bytes, start: int) -> int:
        """Read a scan's header; returns the end of its data, which begin at `start`."""
        count = content[0] if content else 0
        ids = content[1 : 1 + 2 * count : 2]
        scanned = [self._components[key] for key in ids if key in self._components]
        first, last, bits = 0, _COEFFICIENTS - 1, 0
        if self._is_progressive and len(content) >= 4:
            first, last, bits = content[-3], content[-2], content[-1] & 15
        for component in scanned:
            for number in range(first, min(last + 1, _COEFFICIENTS)):
                component.missing_bits[number] = bits
        # Without an interval, libjpeg treats a restart as the end.
        ending = (_SCAN_END if self._restart_interval else _MARKER).search(data, start)
        end = ending.start() if ending else len(data)
        self.scan_ends.append(start + len(data[start:end].rstrip(b"\xff")))  # fill bytes
        if self._restart_interval and scanned:
            expected_restarts = -(-self._num_units(scanned) // self._restart_interval) - 1
            num_restarts = len(_RESTART.findall(data, start, end))
            self._lacks_restarts = self._lacks_restarts or num_restarts < expected_restarts
        return end

    def _num_units(self, scanned: list[_Component]) -> int:
        """The number of units (MCUs) of a scan: blocks of its only component, or of all."""
        across = max(component.horizontal for component in self._components.values())
        down = max(component.vertical for component in self._components.values())
        width, height = self._size
        if len(scanned) == 1:
            width = -(-width * scanned[0].horizontal // across)
            height = -(-height * scanned[0].vertical // down)
            across = down = 1
        return -(-width // (_BLOCK * across)) * -(-height // (_BLOCK * down))


def _ends_grey(image: JpegImageFile) -> bool:
    """Whether the last pixel has the brightness of a missing block."""
    width, height = image.size
    last_pixel = image.crop((width - 1, height - 1, width, height)).tobytes()
    red, green, blue = (3 * last_pixel)[:3]  # grey has one byte
    low, high = _GREY_LUMA
    return low <= 0.299 * red + 0.587 * green + 0.114 * blue <= high


def _lengthen_scans(data: bytes, scan_ends: list[int]) -> bytes:
    """`data` up to the end of the last scan, with bytes appended to each scan."""
    starts = [0, *scan_ends]
    parts = [data[start:end] + _MORE for start, end in zip(starts, scan_ends, strict=False)]
    return b"".join(parts) + bytes((0xFF, _EOI))


def _uses_no_more(longer: bytes, image: JpegImageFile) -> bool:
    """Whether the `longer` data decode to `image`: it was complete."""
    width, height = image.size
    bands = [(0, top, width, min(top + _ROWS, height)) for top in range(0, height, _ROWS)]
    try:
        with JpegImageFile(io.BytesIO(longer)) as other:
            return all(other.crop(band).tobytes() == image.crop(band).tobytes() for band in bands)
    except OSError:
        return True  # inconclusive
