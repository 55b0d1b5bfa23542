"""Small pictures and hostile ones, made in memory."""

from __future__ import annotations

import base64
import io
import struct
import zlib

from PIL import Image

from tests.pictures import heic


def encoded(file_format: str, size: tuple[int, int] = (4, 3), mode: str = "RGB") -> bytes:
    out, picture = io.BytesIO(), Image.new(mode, size)
    if file_format == "HEIC":
        return heic(picture)
    picture.save(out, file_format)
    return out.getvalue()


def animated(file_format: str) -> bytes:
    out = io.BytesIO()
    frames = [Image.new("RGB", (4, 3), color) for color in ("red", "blue")]
    frames[0].save(out, file_format, save_all=True, append_images=frames[1:])
    return out.getvalue()


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: bytes, pixels: bytes = b"") -> bytes:
    """A PNG with arbitrary header values."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    body = png_chunk(b"IDAT", zlib.compress(pixels)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + body


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
