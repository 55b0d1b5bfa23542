"""An image's format and size, read from its header without decoding."""

import contextlib
import io
import struct
import tracemalloc
import zlib

import pytest
from PIL import Image

from tests.support.image_files import animated, image_file, png, png_chunk
from vlm_server.api.parsing.media import image_header
from vlm_server.api.parsing.media.image_header import ImageHeader
from vlm_server.errors import InvalidImage

PARAM = "messages[0].content[3]"
ALLOWED = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "HEIC")
READABLE = "PNG, JPEG, WebP, GIF, AVIF, BMP, TIFF or HEIC"


def read(data: bytes, max_pixels: int = 50_000_000) -> ImageHeader:
    return image_header.read(data, PARAM, max_pixels)


@pytest.mark.parametrize("file_format", ALLOWED)
def test_header_of_every_format_is_read(file_format: str) -> None:
    # HEVC has whole blocks, which are clipped afterwards.
    size = (64, 64) if file_format == "HEIC" else (40, 30)
    assert read(image_file(file_format, (40, 30))) == ImageHeader(file_format, *size)


@pytest.mark.parametrize("file_format", ["PNG", "WEBP", "GIF"])
def test_animation_is_read_as_one_image(file_format: str) -> None:
    assert read(animated(file_format)) == ImageHeader(file_format, 4, 3)


def test_jpeg_with_second_image_is_jpeg() -> None:
    out = io.BytesIO()
    first, second = Image.new("RGB", (8, 6)), Image.new("RGB", (8, 6))
    first.save(out, "MPO", save_all=True, append_images=[second])
    assert read(out.getvalue()) == ImageHeader("JPEG", 8, 6)


@pytest.mark.parametrize("size", [(1, 1), (1, 1000), (52800, 44)])
def test_odd_sizes_are_read(size: tuple[int, int]) -> None:
    assert read(image_file("PNG", size)) == ImageHeader("PNG", *size)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16"])
def test_header_of_every_png_mode_is_read(mode: str) -> None:
    assert read(image_file("PNG", mode=mode)).format == "PNG"


def test_cmyk_jpeg_is_read() -> None:
    assert read(image_file("JPEG", mode="CMYK")).format == "JPEG"


@pytest.mark.parametrize("file_format", ["EPS", "ICO", "PDF", "PPM", "TGA"])
def test_unsupported_format_error_names_supported_ones(file_format: str) -> None:
    with pytest.raises(InvalidImage, match=READABLE) as caught:
        read(image_file(file_format))
    assert caught.value.param == PARAM


@pytest.mark.parametrize(
    "data",
    [
        b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        b"\0\0\0\x18ftypmif1\0\0\0\0mif1miaf" + bytes(64),
        b"II+\0\x08\0\0\0" + bytes(64),
        b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(64),
        b"8BPS\0\x01" + bytes(64),
        b"SIMPLE  =                    T" + bytes(64),
        b"MZ",
        b"\0",
        b"",
    ],
    ids=["svg", "heif", "bigtiff", "jp2", "psd", "fits", "exe", "nul", "empty"],
)
def test_non_images_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidImage, match=READABLE):
        read(data)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\x89PNG\r\n\x1a\n" + bytes(30), "PNG"),
        (b"GIF89a", "GIF"),
        (b"RIFF\x10\0\0\0WEBPVP8X", "WebP"),
        (b"\xff\xd8\xff", "JPEG"),
        (b"BM" + bytes(64), "BMP"),
        (b"II*\0\x08\0\0\0" + bytes(64), "TIFF"),
        (b"\0\0\0\x18ftypmif1\0\0\0\0mif1avif" + bytes(64), "AVIF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(64), "HEIC"),
        (image_file("AVIF")[:150], "AVIF"),
    ],
)
def test_damaged_header_is_reported_as_damaged(data: bytes, name: str) -> None:
    """Reported as another format, clients would convert to the format the file already has."""
    with pytest.raises(InvalidImage, match=f"begins like {name}, but .* damaged") as caught:
        read(data)
    assert "not a readable" not in caught.value.message


def test_heic_without_its_extra_is_refused_with_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(image_header, "_HAS_HEIC", False)
    with pytest.raises(InvalidImage, match=r"vlm-server\[heic\]") as caught:
        read(image_file("HEIC"))
    assert caught.value.param == PARAM


@pytest.mark.parametrize("name", ["AVIF", "HEIC"])
@pytest.mark.parametrize("size", [(9000, 9000), (1, 2**32 - 1), (2**32 - 1, 2**32 - 1)])
def test_largest_image_of_file_counts(name: str, size: tuple[int, int]) -> None:
    """HEIC readers run in a process of their own, so the size comes from the file's boxes."""
    data = bytearray(image_file(name, (64, 48)))
    struct.pack_into(">II", data, data.index(b"ispe") + 8, *size)
    with pytest.raises(InvalidImage, match="more than 50000000 pixels"):
        read(bytes(data))


@pytest.mark.parametrize("size", [(0, 0), (0, 5), (5, 0)])
def test_image_without_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidImage):
        read(png(*size))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    "size", [(13000, 13000), (2**31 - 1, 2**31 - 1), (9000, 9000), (65535, 65535)]
)
def test_too_many_pixels_are_refused_from_header(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidImage, match="more than 50000000 pixels"):
        read(png(*size))


def test_pixel_limit_is_exact() -> None:
    assert read(image_file("PNG", (10, 10)), max_pixels=100).width == 10
    with pytest.raises(InvalidImage):
        read(image_file("PNG", (10, 10)), max_pixels=99)


@pytest.mark.parametrize(
    "chunk",
    [
        png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(50_000_000))),
        png_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(50_000_000))),
        png_chunk(b"iTXt", b"a\0\1\0\0\0" + zlib.compress(bytes(50_000_000))),
    ],
    ids=["zTXt", "iCCP", "iTXt"],
)
def test_compressed_chunks_are_not_decompressed(chunk: bytes) -> None:
    data = png(4, 3, chunk, pixels=bytes(3 * 13))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidImage):
            read(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20  # the chunk alone would be 50 MB


@pytest.mark.parametrize("file_format", ALLOWED)
def test_truncated_image_header_is_read_or_refused(file_format: str) -> None:
    data = image_file(file_format, (64, 48))
    for eighth in range(1, 8):
        with contextlib.suppress(InvalidImage):
            assert read(data[: len(data) * eighth // 8]) == ImageHeader(file_format, 64, 48)


def test_polyglot_has_format_of_its_first_bytes() -> None:
    assert read(image_file("PNG") + image_file("GIF")).format == "PNG"
    assert read(image_file("GIF") + b"%PDF-1.7").format == "GIF"
