"""Test images, drawn with Pillow, and messages with them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tests.support.image_files import data_url, encoded

Size = tuple[int, int]
Point = tuple[float, float]

BLOCK_PIXELS = 20

RGB = {
    "red": (214, 39, 40),
    "green": (20, 150, 60),
    "blue": (31, 80, 200),
    "yellow": (250, 215, 20),
    "orange": (255, 140, 0),
    "purple": (128, 0, 128),
    "black": (10, 10, 10),
    "white": (255, 255, 255),
}


def canvas(size: Size = (448, 448), background: str | tuple[int, int, int] = "white") -> Any:
    return Image.new("RGB", size, background)


def draw_shape(image: Any, shape: str, color: str, center: Point, radius: float) -> Any:
    """Draw a filled shape at `center` (pixels); returns the image."""
    draw, fill = ImageDraw.Draw(image), RGB[color]
    x, y = center
    match shape:
        case "circle":
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill)
        case "square":
            side = radius * 0.85
            draw.rectangle((x - side, y - side, x + side, y + side), fill)
        case "triangle":
            draw.polygon(_around(x, y, [radius] * 3), fill)
        case "star":
            draw.polygon(_around(x, y, [radius, radius * 0.42] * 5), fill)
        case _:
            raise ValueError(shape)
    return image


def one_shape(shape: str, color: str, size: Size = (448, 448), background: Any = "white") -> Any:
    """One large shape in the middle."""
    width, height = size
    image = canvas(size, background)
    return draw_shape(image, shape, color, (width / 2, height / 2), min(size) * 0.28)


def word(text: str, size: Size = (448, 224), font_size: int = 72) -> Any:
    image = canvas(size)
    font = ImageFont.load_default(font_size)
    anchor = (size[0] / 2, size[1] / 2)
    ImageDraw.Draw(image).text(anchor, text, fill=(20, 20, 20), font=font, anchor="mm")
    return image


def random_image(seed: int, width: int = 84, height: int = 84) -> Image.Image:
    """An RGB image of blocks of random colours, the same for the same seed."""
    rows, columns = -(-height // BLOCK_PIXELS), -(-width // BLOCK_PIXELS)
    colours = np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), dtype=np.uint8)
    block = np.ones((BLOCK_PIXELS, BLOCK_PIXELS, 1), dtype=np.uint8)
    return Image.fromarray(np.kron(colours, block)[:height, :width])


def noise(seed: int, size: Size = (448, 448)) -> Image.Image:
    """A larger `random_image`."""
    return random_image(seed, *size)


def image_part(image: Any, image_format: str = "PNG") -> dict[str, Any]:
    url = data_url(encoded(image, image_format), f"image/{image_format.lower()}")
    return {"type": "image_url", "image_url": {"url": url}}


def user(*content: Any) -> dict[str, Any]:
    """A user message of strings and images, in order."""
    parts = [
        {"type": "text", "text": part} if isinstance(part, str) else image_part(part)
        for part in content
    ]
    return {"role": "user", "content": parts}


def _around(x: float, y: float, radii: list[float]) -> list[Point]:
    """The corners around a point, the first one straight up."""
    step = 2 * math.pi / len(radii)
    return [(x + r * math.sin(i * step), y - r * math.cos(i * step)) for i, r in enumerate(radii)]
