"""Draws what an answer points at on the picture that was asked about."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from vlm_server.cli.asking.regions import Region
from vlm_server.cli.failure import CommandFailed
from vlm_server.errors import ConfigError

_COLOURS = ("#e6194b", "#0a84ff", "#34a853", "#f58231", "#911eb4", "#00a3a3")
_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
_LINE_SHARE, _FONT_SHARE = 250, 35
"""Line width and letter height are these parts of the picture's mean side."""


def drawn(data: bytes, regions: Sequence[Region]) -> Image.Image:
    """The picture in `data`, upright, with `regions` marked and labelled on it."""
    with Image.open(io.BytesIO(data)) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    side = math.sqrt(image.width * image.height)
    line, font = max(2, round(side / _LINE_SHARE)), max(10, round(side / _FONT_SHARE))
    draw = ImageDraw.Draw(image)
    for number, region in enumerate(regions):
        colour = _COLOURS[number % len(_COLOURS)]
        x, y = region.x * image.width, region.y * image.height
        right, bottom = x + region.width * image.width, y + region.height * image.height
        if region.kind == "box":
            draw.rectangle((x, y, right, bottom), outline=colour, width=line)
        else:
            reach = 3 * line
            draw.ellipse((x - reach, y - reach, x + reach, y + reach), colour, "white", line)
        if region.label:
            _write(draw, (x, y), region.label, colour, font)
    return image


def upright_size(data: bytes) -> tuple[int, int]:
    """Width and height of the picture in `data`, in pixels, rotated as it says."""
    with Image.open(io.BytesIO(data)) as opened:
        return ImageOps.exif_transpose(opened).size


def _write(
    draw: ImageDraw.ImageDraw, at: tuple[float, float], label: str, colour: str, size: int
) -> None:
    """A label above `at`, or below it where there is no room."""
    font = ImageFont.load_default(size)
    left, top, right, bottom = draw.textbbox((0, 0), label, font)
    width, height = right - left + size / 2, bottom - top + size / 2
    x, y = at[0], at[1] - height if at[1] >= height else at[1]
    draw.rectangle((x, y, x + width, y + height), colour)
    draw.text((x + size / 4 - left, y + size / 4 - top), label, "white", font)


def check_target(path: Path) -> None:
    """Raises ConfigError or CommandFailed if no picture can be written to `path`."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--save-boxes {path}: expected a name that ends in .png, .jpg or .webp")
    if not path.absolute().parent.is_dir():
        raise CommandFailed(f"can't write {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise CommandFailed(f"can't write {path}: it is a folder")


def save(image: Image.Image, path: Path) -> None:
    """Raises CommandFailed."""
    try:
        image.save(path, _FORMATS[path.suffix.lower()])
    except OSError as error:
        raise CommandFailed(f"can't write {path}: {error.strerror or error}") from None
