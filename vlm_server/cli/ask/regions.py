"""Boxes and points in an answer: found in its text, drawn on its image, shown in a terminal.

The forms are those of the page (`regions.js`). The terminal's protocol follows from its
environment: the reply to a query could end up in the next program's input. Protocols:
https://sw.kovidgoyal.net/kitty/graphics-protocol/, https://iterm2.com/documentation-images.html.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image, ImageDraw, ImageFont, ImageOps

from vlm_server.cli.exit_codes import CommandFailed
from vlm_server.errors import ConfigError

_N = r"\s*(-?\d{1,9}(?:\.\d{1,9})?)\s*"
_PAIR = f"{_N},{_N}"
_FOUR = f"{_PAIR},{_PAIR}"
_BOX = re.compile(rf'"(?:bbox_2d|bbox|box)"\s*:\s*\[{_FOUR}\]')
_Y_FIRST_BOX = re.compile(rf'"box_2d"\s*:\s*\[{_FOUR}\]')
_MARKED_BOX = re.compile(rf"<\|?box(?:_start)?\|?>\s*\({_PAIR}\),\({_PAIR}\)")
_POINT = re.compile(rf'"(?:point_2d|point|coordinates?|position)"\s*:\s*\[{_PAIR}\]')
_X_AND_Y = re.compile(rf'"x"\s*:{_N},\s*"y"\s*:{_N}[,}}\s]')
_PERCENT = re.compile(rf'x\d*="{_N}"\s+y\d*="{_N}"')
_BARE = re.compile(rf"[(\[]{{0,2}}{_PAIR}(?:,{_PAIR})?[)\]]{{0,2}}\.?")
_LABEL = re.compile(r'"(?:label|name|text_content)"\s*:\s*"([^"]*)"')
_TOLERANCE = 1.01
_THOUSAND = 1000.0
_COLOURS = ("#e6194b", "#0a84ff", "#34a853", "#f58231", "#911eb4", "#00a3a3")
_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
_LINE_SHARE, _FONT_SHARE = 250, 35
"""Divisors of the image's mean side for the line width and the letter height."""
Protocol = Literal["kitty", "iterm2"]
_MAX_SIDE_PIXELS = 1024
_MAX_COLUMNS = 60
_CHUNK_BYTES = 4096
_KITTY_PROGRAMS = ("ghostty", "WezTerm", "kitty")
_ITERM_PROGRAMS = ("iTerm.app", "mintty", "vscode", "rio")
_MULTIPLEXERS = ("tmux", "screen")


@dataclass(frozen=True, slots=True)
class Region:
    """A place in an image, as fractions of its sides; a point has no width and no height."""

    kind: Literal["box", "point"]
    x: float
    y: float
    width: float = 0.0
    height: float = 0.0
    label: str = ""


def find_regions(text: str, scale: tuple[float, float] = (_THOUSAND, _THOUSAND)) -> list[Region]:
    """The regions in `text`; `scale` is the right and lower edge of the image in the model's units.

    Boxes with y first (box_2d, to 1000) and Molmo's points (percent) have scales of their own.
    """
    thousand, percent = (_THOUSAND, _THOUSAND), (100.0, 100.0)
    forms = (
        (_BOX, scale),
        (_Y_FIRST_BOX, thousand),
        (_MARKED_BOX, scale),
        (_POINT, scale),
        (_X_AND_Y, scale),
        (_PERCENT, percent),
    )
    regions = [
        _region(match, edges, _label_of(text, match) if match[0].startswith('"') else "")
        for pattern, edges in forms
        for match in pattern.finditer(text)
    ]
    if not regions and (bare := _BARE.fullmatch(text.strip())):
        regions = [_region(bare, scale, "")]
    return [
        region
        for region in regions
        if min(region.x, region.y) >= 0
        and max(region.x + region.width, region.y + region.height) <= _TOLERANCE
    ]


def _region(match: re.Match[str], scale: tuple[float, float], label: str) -> Region:
    """The region of a match: two numbers are a point, four a box."""
    numbers = [float(number) for number in match.groups() if number is not None]
    if match.re is _Y_FIRST_BOX:
        numbers = [numbers[place] for place in (1, 0, 3, 2)]
    across, down = scale
    x, y = numbers[0] / across, numbers[1] / down
    if len(numbers) == 2:
        return Region("point", x, y, label=label)
    left, right = sorted((x, numbers[2] / across))
    top, bottom = sorted((y, numbers[3] / down))
    return Region("box", left, top, right - left, bottom - top, label)


def _label_of(text: str, match: re.Match[str]) -> str:
    """The label in the JSON object around the match."""
    start, end = text.rfind("{", 0, match.start() + 1), text.find("}", match.start())
    around = text[start : end if end >= 0 else None] if start >= 0 else ""
    label = _LABEL.search(around)
    return label[1] if label else ""


def draw_regions(data: bytes, regions: Sequence[Region]) -> Image.Image:
    """The image in `data`, upright, with `regions` marked and labelled."""
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
    """The width and height in pixels of the image in `data`, as its orientation says."""
    with Image.open(io.BytesIO(data)) as opened:
        return ImageOps.exif_transpose(opened).size


def _write(
    draw: ImageDraw.ImageDraw, at: tuple[float, float], label: str, colour: str, size: int
) -> None:
    """Write `label` above `at`, or below it where there is no room."""
    font = ImageFont.load_default(size)
    left, top, right, bottom = draw.textbbox((0, 0), label, font)
    width, height = right - left + size / 2, bottom - top + size / 2
    x, y = at[0], at[1] - height if at[1] >= height else at[1]
    draw.rectangle((x, y, x + width, y + height), colour)
    draw.text((x + size / 4 - left, y + size / 4 - top), label, "white", font)


def check_target(path: Path) -> None:
    """Raises ConfigError or CommandFailed if no image can be written to `path`."""
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--save-boxes {path}: expected a name that ends in .png, .jpg or .webp")
    if not path.absolute().parent.is_dir():
        raise CommandFailed(f"can't write {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise CommandFailed(f"can't write {path}: it is a folder")


def save(image: Image.Image, path: Path) -> None:
    """Write `image` to `path`. Raises CommandFailed."""
    try:
        image.save(path, _FORMATS[path.suffix.lower()])
    except OSError as error:
        raise CommandFailed(f"can't write {path}: {error.strerror or error}") from None


def protocol_of(environment: Mapping[str, str]) -> Protocol | None:
    """The image protocol of the terminal; None inside tmux and screen, which pass on neither."""
    term = environment.get("TERM", "")
    if environment.get("TMUX") or term.startswith(_MULTIPLEXERS) or term in ("", "dumb"):
        return None
    program = environment.get("TERM_PROGRAM", "")
    is_kitty = environment.get("KITTY_WINDOW_ID") or term in ("xterm-kitty", "xterm-ghostty")
    if is_kitty or program in _KITTY_PROGRAMS:
        return "kitty"
    is_iterm = environment.get("LC_TERMINAL") == "iTerm2" or program in _ITERM_PROGRAMS
    return "iterm2" if is_iterm else None


def sequence(image: Image.Image, protocol: Protocol, columns: int) -> str:
    """The escape sequence that shows `image` in a terminal of `columns`."""
    small = image.copy()
    small.thumbnail((_MAX_SIDE_PIXELS, _MAX_SIDE_PIXELS))
    png = io.BytesIO()
    small.save(png, "PNG")
    data, wide = png.getvalue(), min(columns, _MAX_COLUMNS)
    encoded = base64.b64encode(data).decode()
    if protocol == "iterm2":
        return f"\x1b]1337;File=inline=1;size={len(data)};width={wide}:{encoded}\x07\n"
    chunks = [encoded[i : i + _CHUNK_BYTES] for i in range(0, len(encoded), _CHUNK_BYTES)]
    parts = []
    for number, chunk in enumerate(chunks):
        has_more = int(number < len(chunks) - 1)
        head = f"a=T,f=100,q=2,c={wide},m={has_more}" if not number else f"m={has_more}"
        parts.append(f"\x1b_G{head};{chunk}\x1b\\")
    return "".join(parts) + "\n"
