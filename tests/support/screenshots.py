"""Screenshots of a drawn desktop at work: the same turns for the same seed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageDraw

_WORDS = ("open", "save", "send", "file", "report", "week", "folder", "name", "all", "last", "to")
_ARROW = ((0, 0), (0, 18), (5, 13), (9, 20), (12, 18), (8, 12), (14, 12))
_WINDOW_MOVES_EVERY = 5
_LINE_PIXELS = 18


def screenshots(
    seed: int, turns: int, width: int = 1920, height: int = 1080
) -> Iterator[Image.Image]:
    """Each turn the pointer moves and a line is written; each fifth, the window is moved too."""
    random = np.random.default_rng(seed)
    wallpaper = _wallpaper(width, height)
    size = width * 2 // 5, height * 2 // 5
    lines, place = list[str](), (width // 8, height // 8)
    for turn in range(turns):
        if turn and turn % _WINDOW_MOVES_EVERY == 0:
            place = _somewhere(random, width - size[0], height - size[1] - 40)
        lines.append(" ".join(random.choice(_WORDS, 8)))
        image = wallpaper.copy()
        draw = ImageDraw.Draw(image)
        _draw_bar(draw, width, height, turn)
        _draw_window(draw, place, size, lines)
        x, y = _somewhere(random, width, height)
        draw.polygon([(x + right, y + down) for right, down in _ARROW], "white", "black")
        yield image


def _wallpaper(width: int, height: int) -> Image.Image:
    across = np.linspace(40, 90, width)[None, :, None]
    down = np.linspace(0, 60, height)[:, None, None]
    return Image.fromarray((across + down + np.array([0, 20, 60])).astype(np.uint8))


def _somewhere(random: np.random.Generator, width: int, height: int) -> tuple[int, int]:
    return int(random.integers(0, max(1, width))), int(random.integers(0, max(1, height)))


def _draw_bar(draw: ImageDraw.ImageDraw, width: int, height: int, turn: int) -> None:
    draw.rectangle((0, height - 40, width, height), "#202428")
    for number in range(6):
        draw.rectangle((10 + 50 * number, height - 34, 42 + 50 * number, height - 6), "#5080c0")
    draw.text((width - 60, height - 26), f"10:{turn:02d}", "white")


def _draw_window(
    draw: ImageDraw.ImageDraw, place: tuple[int, int], size: tuple[int, int], lines: list[str]
) -> None:
    (x, y), (width, height) = place, size
    draw.rectangle((x, y, x + width, y + height), "#f4f4f4", "#606060")
    draw.rectangle((x, y, x + width, y + 28), "#d0d4da")
    draw.text((x + 10, y + 8), "Notes", "black")
    for number, line in enumerate(lines[-((height - 40) // _LINE_PIXELS) :]):
        draw.text((x + 10, y + 36 + number * _LINE_PIXELS), line, "black")
