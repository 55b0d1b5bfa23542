"""Pictures for tests: random blocks of colour, the same for the same seed."""

from __future__ import annotations

import numpy as np
from PIL import Image

BLOCK_PIXELS = 20


def picture(seed: int, width: int = 84, height: int = 84) -> Image.Image:
    """An RGB picture of `width` by `height` pixels, in blocks of 20."""
    rows, columns = -(-height // BLOCK_PIXELS), -(-width // BLOCK_PIXELS)
    colours = np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), dtype=np.uint8)
    block = np.ones((BLOCK_PIXELS, BLOCK_PIXELS, 1), dtype=np.uint8)
    return Image.fromarray(np.kron(colours, block)[:height, :width])
