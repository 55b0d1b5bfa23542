"""Encoded images: small ones, hostile ones, and ones that are expensive to decode."""

from __future__ import annotations

import base64
import hashlib
import io
import struct
import zlib
from functools import cache

from PIL import Image as PillowImage

from vlm_server.protocol import Image

_END, _SCAN = 0xD9, 0xDA
_PNG_HEADER_BYTES = 33


def encoded(image: PillowImage.Image, file_format: str = "PNG", **options: object) -> bytes:
    """`image` as a file of `file_format`; HEIC as phones write it."""
    if file_format == "HEIC":
        return heic(image, **options)
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def image_file(file_format: str, size: tuple[int, int] = (4, 3), mode: str = "RGB") -> bytes:
    """A plain image as a file of `file_format`."""
    return encoded(PillowImage.new(mode, size), file_format)


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def submitted(image: PillowImage.Image, file_format: str = "PNG", **options: object) -> Image:
    """`image`, encoded, in the form in which the front sends it to the engine."""
    return image_of(encoded(image, file_format, **options), file_format, *image.size)


def image_of(data: bytes, file_format: str, width: int, height: int) -> Image:
    """A file in the form in which the front sends it to the engine."""
    return Image(data, hashlib.sha256(data).hexdigest(), file_format, width, height, "messages[0]")


def animated(file_format: str) -> bytes:
    out = io.BytesIO()
    frames = [PillowImage.new("RGB", (4, 3), color) for color in ("red", "blue")]
    frames[0].save(out, file_format, save_all=True, append_images=frames[1:])
    return out.getvalue()


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: bytes, pixels: bytes = b"") -> bytes:
    """A PNG with arbitrary header values."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = png_chunk(b"IDAT", zlib.compress(pixels)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + body


def slow_jpeg(side_pixels: int, num_scans: int) -> bytes:
    """A progressive JPEG whose last scan, of few bytes, is repeated.

    Each repetition takes the decoder as long as a pass over the whole image.
    """
    buffer = io.BytesIO()
    grey = PillowImage.new("L", (side_pixels, side_pixels), 128)
    grey.save(buffer, "JPEG", progressive=True)
    whole = buffer.getvalue()
    head, scan = whole[:-2], _last_scan(whole)
    return head + scan * num_scans + whole[-2:]


def heic(image: PillowImage.Image, **options: object) -> bytes:
    """A HEIC file as phones write it; Pillow itself can't write one."""
    import pillow_heif

    buffer = io.BytesIO()
    pillow_heif.from_pillow(image).save(buffer, format="HEIF", **options)
    return buffer.getvalue()


@cache
def large_png(side_pixels: int) -> bytes:
    """A plain RGB image, whose file is small."""
    buffer = io.BytesIO()
    PillowImage.new("RGB", (side_pixels, side_pixels)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def other_png(png: bytes, number: int) -> bytes:
    """The same pixels in other bytes for each number, so that no cache has the image."""
    chunk = png_chunk(b"tEXt", b"number\0%d" % number)
    return png[:_PNG_HEADER_BYTES] + chunk + png[_PNG_HEADER_BYTES:]


def other_jpeg(jpeg: bytes, number: int) -> bytes:
    """The same pixels in other bytes for each number, so that no cache has the image."""
    return jpeg[:2] + b"\xff\xfe\0\6" + struct.pack(">I", number) + jpeg[2:]


def _last_scan(jpeg: bytes) -> bytes:
    position, scan = 2, b""
    while jpeg[position + 1] != _END:
        kind = jpeg[position + 1]
        end = position + 2 + struct.unpack_from(">H", jpeg, position + 2)[0]
        if kind == _SCAN:
            while jpeg[end] != 0xFF or jpeg[end + 1] == 0:
                end += 1
            scan = jpeg[position:end]
        position = end
    return scan
