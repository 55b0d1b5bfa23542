"""Headers that keep readers busy for minutes are refused at once; ordinary files pass."""

from __future__ import annotations

import io
import struct
import zlib

import pytest
from PIL import Image, PngImagePlugin

from tests.support.image_files import animated, image_file, png, png_chunk
from tests.support.processor_time import processor_time
from vlm_server.api.parsing.media import image_bounds, image_header
from vlm_server.errors import InvalidImage

SIZE = (64, 48)
SECONDS = 2.0
"""Readers take 5 to 70 for each of these files; the walk a tenth of one, on an idle machine."""

PNG = png(*SIZE, pixels=bytes(48 * 193))
JPEG = image_file("JPEG", SIZE)
GIF = image_file("GIF", SIZE)
WEBP = image_file("WEBP", SIZE)


def inserted(data: bytes, position: int, unit: bytes, mebibytes: int = 20) -> bytes:
    """`data`, grown to the wanted size by repeating `unit` at `position`."""
    return data[:position] + unit * (((mebibytes << 20) - len(data)) // len(unit)) + data[position:]


def inflating(name: bytes) -> bytes:
    return png_chunk(name, b"a\0\0" + zlib.compress(bytes(1_000_000)))


def segment(marker: int, content: bytes = b"") -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content


def exif(num_entries: int, value_bytes: int) -> bytes:
    """EXIF whose entries all claim the same bytes."""
    entry = struct.pack("<HHII", 0x9000, 1, value_bytes, 8)
    return b"II*\0\x08\0\0\0" + struct.pack("<H", num_entries) + entry * num_entries + bytes(4)


def progressive() -> bytes:
    out = io.BytesIO()
    Image.effect_noise(SIZE, 80).save(out, "JPEG", progressive=True)
    return out.getvalue()


def many_scans() -> bytes:
    data = progressive()
    first = data.index(b"\xff\xda")
    scan = data[first : data.index(b"\xff", first + 20)]
    return inserted(data, len(data) - 2, scan, 1)


def tiff_of_strips(count: int) -> bytes:
    """A grey TIFF of one column, with a strip for each row."""
    table, pixels = 10 + 6 * 12 + 4, 10 + 6 * 12 + 4 + 4 * count
    entries = [(256, 3, 1, 1), (257, 4, 1, count), (258, 3, 1, 8), (262, 3, 1, 1)]
    entries += [(273, 4, count, table), (278, 3, 1, 1)]
    directory = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    places = struct.pack(f"<{count}I", *range(pixels, pixels + count))
    return b"II*\0\x08\0\0\0\6\0" + directory + bytes(4) + places + bytes(count)


def gif_start() -> int:
    """The offset of the first block of `GIF`."""
    return 13 + (3 << ((GIF[10] & 7) + 1) if GIF[10] & 0x80 else 0)


BOMBS = {
    "PNG, 10,000 profiles": lambda: inserted(PNG, 33, inflating(b"iCCP"), 10),
    "PNG, 10,000 texts": lambda: inserted(PNG, 33, inflating(b"zTXt"), 10),
    "PNG, texts at the end": lambda: inserted(PNG, len(PNG) - 12, inflating(b"zTXt"), 10),
    "PNG, 1.7 million chunks": lambda: inserted(PNG, 33, png_chunk(b"abCd", b"")),
    "PNG, 1.7 million chunks of pixels": lambda: inserted(PNG, 33, png_chunk(b"IDAT", b"")),
    "PNG, EXIF entries that share bytes": lambda: (
        PNG[:33] + png_chunk(b"eXIf", exif(5000, 50_000)) + PNG[33:]
    ),
    "PNG, EXIF that inflates": lambda: (
        PNG[:33]
        + png_chunk(
            b"zTXt",
            b"Raw profile type exif\0\0"
            + zlib.compress(b"\nexif\n 1\n" + exif(40_000, 400_000).hex().encode()),
        )
        + PNG[33:]
    ),
    "JPEG, fill bytes": lambda: inserted(JPEG, 2, b"\xff"),
    "JPEG, zeros": lambda: inserted(JPEG, 2, b"\0"),
    "JPEG, escaped fill bytes": lambda: inserted(JPEG, 2, b"\xff\0"),
    "JPEG, markers without length": lambda: inserted(JPEG, 2, b"\xff\xd0"),
    "JPEG, empty comments": lambda: inserted(JPEG, 2, segment(0xFE)),
    "JPEG, Photoshop's lists": lambda: inserted(
        JPEG, 2, segment(0xED, b"Photoshop 3.0\0" + b"8BIM\4\4\0\0\0\0\0\0" * 5400)
    ),
    "JPEG, EXIF again and again": lambda: inserted(
        JPEG, 2, segment(0xE1, b"Exif\0\0" + bytes(65_000))
    ),
    "JPEG, fill bytes to the end": lambda: JPEG[:2] + b"\xff" * (20 << 20),
    "JPEG, fill bytes between pixels": lambda: inserted(JPEG, len(JPEG) - 2, b"\xff"),
    "JPEG, scans": lambda: many_scans(),
    "GIF, comments": lambda: inserted(GIF, gif_start(), b"!\xfe\1c\0"),
    "GIF, a long comment": lambda: inserted(GIF, gif_start(), b"!\xfe" + b"\1c" * 999 + b"\0"),
    "GIF, empty extensions": lambda: inserted(GIF, gif_start(), b"!\xf9\0"),
    "GIF, zeros": lambda: inserted(GIF, gif_start(), b"\0"),
    "TIFF, strips": lambda: tiff_of_strips(300_000),
    "TIFF, entries": lambda: b"II*\0\x08\0\0\0\xff\xff" + b"\0\1\1\0\1\0\0\0\0\0\0\0" * 65_535,
    "WebP, empty chunks": lambda: inserted(WEBP, len(WEBP), b"abcd\0\0\0\0"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_header_bomb_is_refused_at_once(name: str) -> None:
    data = BOMBS[name]()
    with (
        processor_time() as measured,
        pytest.raises(InvalidImage, match="The image's file has too many"),
    ):
        image_header.read(data, "messages[0].content[0]", 50_000_000)
    assert measured.seconds < SECONDS


def with_much_else() -> bytes:
    """A PNG with texts of all kinds and a profile, as image tools write it."""
    info = PngImagePlugin.PngInfo()
    for number in range(100):
        info.add_text(f"key {number}", "value " * 100)
    for number in range(10):
        info.add_text(f"zip {number}", "value " * 1000, zip=True)
    info.add_itxt("XML:com.adobe.xmp", "<x>" + "y" * 100_000 + "</x>")
    out = io.BytesIO()
    Image.effect_noise((1000, 700), 80).save(
        out, "PNG", pnginfo=info, icc_profile=bytes(500_000), exif=exif(60, 4)
    )
    return out.getvalue()


def large_profile() -> bytes:
    out = io.BytesIO()
    Image.new("CMYK", SIZE).save(
        out, "JPEG", icc_profile=bytes(2 << 20), exif=b"Exif\0\0" + exif(60, 4), comment="x" * 5000
    )
    return out.getvalue()


def long_film() -> bytes:
    out = io.BytesIO()
    frames = [Image.new("RGB", (4, 3), (number, 0, 0)) for number in range(250)]
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], comment=b"x" * 5000)
    return out.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        PNG,
        JPEG,
        GIF,
        WEBP,
        progressive(),
        with_much_else(),
        large_profile(),
        long_film(),
        tiff_of_strips(10_000),
        *(image_file(name, SIZE) for name in ("TIFF", "BMP", "AVIF", "HEIC")),
        *(animated(name) for name in ("PNG", "GIF", "WEBP")),
        inserted(JPEG, len(JPEG), bytes(1), 1),
        *(inserted(data, len(data), b"\xff", 1) for data in (JPEG, progressive())),
        JPEG[:2] + b"\xff" * 100 + JPEG[2:],
        JPEG[:2] + segment(0xE1, b"Exif\0\0" + b"\xff" * 60_000) + JPEG[2:],
        inserted(PNG, len(PNG), png_chunk(b"abCd", b""), 1),
        inserted(GIF, len(GIF), b"!\xfe\1c\0", 1),
    ],
)
def test_ordinary_files_pass_bounds_check(data: bytes) -> None:
    image_bounds.check(data)
    assert image_header.read(data, "p", 50_000_000).width > 0


def test_bounds_check_of_one_mebibyte_takes_milliseconds() -> None:
    data = image_file("JPEG", (64, 48))[:-2] + bytes(range(256)) * 4096 + b"\xff\xd9"
    with processor_time() as measured:
        image_bounds.check(data)
    assert measured.seconds < 0.2


@pytest.mark.parametrize(
    "data", [PNG, JPEG, GIF, WEBP, image_file("TIFF", (8, 6)), with_much_else()[:2000]]
)
def test_truncated_file_is_walked_to_its_end(data: bytes) -> None:
    for end in range(len(data)):
        image_bounds.check(data[:end])
