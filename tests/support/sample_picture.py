"""The sample picture of the page and of README: this module writes both files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from tests.support.images import canvas, draw_shape

_ROOT = Path(__file__).parents[2]
PATHS = (_ROOT / "vlm_server/api/page/static/sample.png", _ROOT / "docs/images/sample.png")
SIZE = (640, 400)
SHAPES = (
    ("star", "purple", (130, 200), 90),
    ("circle", "red", (320, 110), 70),
    ("square", "blue", (510, 110), 66),
    ("square", "blue", (510, 295), 66),
)
"""Shape, colour, middle and radius of each, in pixels."""
_FINER = 4


def draw_sample() -> Any:
    """The picture, with smooth edges."""
    width, height = SIZE
    image = canvas((width * _FINER, height * _FINER))
    for shape, color, (x, y), radius in SHAPES:
        draw_shape(image, shape, color, (x * _FINER, y * _FINER), radius * _FINER)
    return image.resize(SIZE, Image.Resampling.LANCZOS).quantize(64, dither=Image.Dither.NONE)


if __name__ == "__main__":
    for path in PATHS:
        draw_sample().save(path, optimize=True)
