"""Encoded pictures in the form that the front sends to the engine."""

from __future__ import annotations

import hashlib
import io
import random

from PIL import Image as PillowImage

from tests.pictures import heic
from vlm_server.protocol import Image

BLOCK_PIXELS = 20


def encoded(picture: PillowImage.Image, name: str = "PNG", **options: object) -> Image:
    if name == "HEIC":
        return image_of(heic(picture, **options), name, *picture.size)
    buffer = io.BytesIO()
    picture.save(buffer, name, **options)
    return image_of(buffer.getvalue(), name, *picture.size)


def image_of(data: bytes, name: str, width: int, height: int) -> Image:
    return Image(data, hashlib.sha256(data).hexdigest(), name, width, height, "messages[0]")


def blocks(seed: int, width: int, height: int) -> PillowImage.Image:
    """Blocks of random colours, the same for the same seed."""
    columns, rows = -(-width // BLOCK_PIXELS), -(-height // BLOCK_PIXELS)
    colours = random.Random(seed).randbytes(3 * columns * rows)
    whole = columns * BLOCK_PIXELS, rows * BLOCK_PIXELS
    picture = PillowImage.frombytes("RGB", (columns, rows), colours)
    return picture.resize(whole, PillowImage.Resampling.NEAREST).crop((0, 0, width, height))
