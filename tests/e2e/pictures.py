"""Test pictures, drawn with Pillow, and messages with them."""

from __future__ import annotations

import base64
import io
import math
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Size = tuple[int, int]
Point = tuple[float, float]

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


def draw_shape(picture: Any, shape: str, color: str, center: Point, radius: float) -> Any:
    """Draw a filled shape at `center` (pixels); returns the picture."""
    draw, fill = ImageDraw.Draw(picture), RGB[color]
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
    return picture


def one_shape(shape: str, color: str, size: Size = (448, 448), background: Any = "white") -> Any:
    """One large shape in the middle."""
    width, height = size
    picture = canvas(size, background)
    return draw_shape(picture, shape, color, (width / 2, height / 2), min(size) * 0.28)


def word(text: str, size: Size = (448, 224), font_size: int = 72) -> Any:
    picture = canvas(size)
    font = ImageFont.load_default(font_size)
    anchor = (size[0] / 2, size[1] / 2)
    ImageDraw.Draw(picture).text(anchor, text, fill=(20, 20, 20), font=font, anchor="mm")
    return picture


def noise(seed: int, size: Size = (448, 448)) -> Any:
    """A picture of random 20-pixel blocks, new for each seed."""
    width, height = size
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (height // 20 + 1, width // 20 + 1, 3), dtype=np.uint8)
    return Image.fromarray(np.kron(blocks, np.ones((20, 20, 1), np.uint8))[:height, :width])


def encoded(picture: Any, image_format: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, image_format)
    return buffer.getvalue()


def data_url(picture: Any, image_format: str = "PNG") -> str:
    text = base64.b64encode(encoded(picture, image_format)).decode()
    return f"data:image/{image_format.lower()};base64,{text}"


def image_part(picture: Any, image_format: str = "PNG") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(picture, image_format)}}


def user(*content: Any) -> dict[str, Any]:
    """A user message of strings and pictures, in order."""
    parts = [
        {"type": "text", "text": part} if isinstance(part, str) else image_part(part)
        for part in content
    ]
    return {"role": "user", "content": parts}


def _around(x: float, y: float, radii: list[float]) -> list[Point]:
    """The corners around a point, the first one straight up."""
    step = 2 * math.pi / len(radii)
    return [(x + r * math.sin(i * step), y - r * math.cos(i * step)) for i, r in enumerate(radii)]
