"""Boxes and points in what a model wrote: the forms that the page knows (`regions.js`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, slots=True)
class Region:
    """A place in a picture, as fractions of its sides; a point has no width and no height."""

    kind: Literal["box", "point"]
    x: float
    y: float
    width: float = 0.0
    height: float = 0.0
    label: str = ""


def find_regions(text: str, scale: tuple[float, float] = (_THOUSAND, _THOUSAND)) -> list[Region]:
    """All in `text`. `scale` is what the right and the lower edge of the picture are.

    That is 1000 for both unless the model's family counts the pixels that it saw; box_2d (y
    first, to 1000) and Molmo's points (percent) have scales of their own.
    """
    across, down = scale
    found = [*_boxes(text, across, down), *_points(text, across, down)]
    if not found and (bare := _BARE.fullmatch(text.strip())):
        x1, y1, x2, y2 = bare.groups()
        if x2 is None:
            found = [_point(x1, y1, across, down)]
        else:
            found = [_box((x1, y1, x2, y2), across, down)]
    return [region for region in found if _is_inside(region)]


def _boxes(text: str, across: float, down: float) -> Iterator[Region]:
    for match in _BOX.finditer(text):
        yield _box(match.groups(), across, down, _label_of(text, match))
    for match in _Y_FIRST_BOX.finditer(text):
        y1, x1, y2, x2 = match.groups()
        yield _box((x1, y1, x2, y2), _THOUSAND, _THOUSAND, _label_of(text, match))
    for match in _MARKED_BOX.finditer(text):
        yield _box(match.groups(), across, down)


def _points(text: str, across: float, down: float) -> Iterator[Region]:
    for pattern in (_POINT, _X_AND_Y):
        for match in pattern.finditer(text):
            yield _point(match[1], match[2], across, down, _label_of(text, match))
    for match in _PERCENT.finditer(text):
        yield _point(match[1], match[2], 100.0, 100.0)


def _box(corners: tuple[str, ...], across: float, down: float, label: str = "") -> Region:
    x1, y1, x2, y2 = map(float, corners)
    left, right = sorted((x1 / across, x2 / across))
    top, bottom = sorted((y1 / down, y2 / down))
    return Region("box", left, top, right - left, bottom - top, label)


def _point(x: str, y: str, across: float, down: float, label: str = "") -> Region:
    return Region("point", float(x) / across, float(y) / down, label=label)


def _label_of(text: str, match: re.Match[str]) -> str:
    """The label of the JSON object that the match stands in."""
    start, end = text.rfind("{", 0, match.start() + 1), text.find("}", match.start())
    around = text[start : end if end >= 0 else None] if start >= 0 else ""
    found = _LABEL.search(around)
    return found[1] if found else ""


def _is_inside(region: Region) -> bool:
    right, bottom = region.x + region.width, region.y + region.height
    return region.x >= 0 and region.y >= 0 and max(right, bottom) <= _TOLERANCE
