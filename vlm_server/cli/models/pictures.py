"""The pictures that `models check` asks about, drawn with Pillow."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

_SIDE = 448
_RED, _BLUE, _DARK = (214, 39, 40), (31, 80, 200), (20, 20, 20)


@dataclass(frozen=True, slots=True)
class Drawn:
    """A question about a picture: what it `shows`, and the data URL of its PNG."""

    shows: str
    question: str
    url: str


def drawn() -> Iterator[Drawn]:
    """A shape, several shapes, a word."""
    image, draw = _canvas()
    draw.ellipse((100, 100, 348, 348), _RED)
    yield Drawn("A red circle", "What shape is this?", _url(image))
    image, draw = _canvas()
    for left in (40, 170, 300):
        draw.rectangle((left, 170, left + 108, 278), _BLUE)
    yield Drawn("Three blue squares", "How many squares are there?", _url(image))
    image, draw = _canvas()
    font = ImageFont.load_default(96)
    draw.text((_SIDE / 2, _SIDE / 2), "HELLO", _DARK, font, anchor="mm")
    yield Drawn("The word HELLO", "Which word is written here?", _url(image))


def _canvas() -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (_SIDE, _SIDE), "white")
    return image, ImageDraw.Draw(image)


def _url(image: Image.Image) -> str:
    png = io.BytesIO()
    image.save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
