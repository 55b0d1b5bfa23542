"""Makes random images, which no server has cached."""

from __future__ import annotations

import base64
import io
import random
import re

from PIL import Image

from vlm_server.errors import ConfigError

BLOCK_PIXELS = 20
_MAX_SIDE_PIXELS = 8192


def parse_size(text: str) -> tuple[int, int]:
    """`560x420` as (width, height). Raises ConfigError."""
    found = re.fullmatch(r"([0-9]{1,5})[x×]([0-9]{1,5})", text.strip().lower())  # noqa: RUF001
    size = (int(found[1]), int(found[2])) if found else (0, 0)
    if not all(BLOCK_PIXELS <= side <= _MAX_SIDE_PIXELS for side in size):
        raise ConfigError(
            f"expected WIDTHxHEIGHT, each from {BLOCK_PIXELS} to {_MAX_SIDE_PIXELS}, not {text!r}"
        )
    return size


def random_png(size: tuple[int, int], rng: random.Random) -> bytes:
    """A PNG of `size` (width, height) made of random blocks; determined by `rng`."""
    width, height = size
    columns, rows = -(-width // BLOCK_PIXELS), -(-height // BLOCK_PIXELS)
    blocks = Image.frombytes("RGB", (columns, rows), rng.randbytes(3 * columns * rows))
    large = (columns * BLOCK_PIXELS, rows * BLOCK_PIXELS)
    image = blocks.resize(large, Image.Resampling.NEAREST).crop((0, 0, width, height))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_url(png: bytes) -> str:
    """`png` as a data URL."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
