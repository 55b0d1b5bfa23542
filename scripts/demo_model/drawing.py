"""Draws on one picture: backgrounds, shapes, words. Knows pixels; knows no questions."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from demo_model.fonts import Mask
from demo_model.palette import Color, distance, luminance, pick_name, shade

Picture = NDArray[np.uint8]
SHIFT = 4
SUBPIXEL = 1 << SHIFT

cv2.setNumThreads(1)


@dataclass
class Ground:
    """A background: its pixels, the colours to stay away from, its name if it has one."""

    pixels: Picture
    colors: list[Color]
    name: str | None


def _solid(height: int, width: int, color: Color) -> Picture:
    picture = np.empty((height, width, 3), np.uint8)
    cv2.rectangle(picture, (0, 0), (width, height), color, -1)
    return picture


def _any_color(rng: random.Random) -> Color:
    kind = rng.random()
    if kind < 0.4:
        base = rng.randint(200, 255)
        spread = 35
    elif kind < 0.7:
        base = rng.randint(0, 60)
        spread = 35
    else:
        base = rng.randint(40, 210)
        spread = 110
    r, g, b = (min(255, max(0, base + rng.randint(-spread, spread))) for _ in range(3))
    return (r, g, b)


def _named_ground(rng: random.Random, height: int, width: int) -> Ground:
    kind = rng.random()
    if kind < 0.50:
        name, color = "white", (255, 255, 255)
        if rng.random() < 0.25:
            color = shade(rng, "white")
    elif kind < 0.66:
        name, color = "black", (0, 0, 0)
        if rng.random() < 0.5:
            color = shade(rng, "black")
    else:
        name = rng.choice(("red", "orange", "yellow", "green", "blue", "purple", "gray", "pink"))
        color = shade(rng, name)
    return Ground(_solid(height, width, color), [color], name)


def _gradient(rng: random.Random, height: int, width: int) -> Ground:
    first = _any_color(rng)
    reach = rng.choice((40, 70, 110))
    ends = [
        tuple(min(255, max(0, part + rng.randint(-reach, reach))) for part in first)
        for _ in range(rng.choice((1, 3)))
    ]
    corners: list[Color] = [first, *ends]  # type: ignore[list-item]
    if len(corners) == 2:
        a, b = corners
        quad = [a, b, a, b] if rng.random() < 0.5 else [a, a, b, b]
    else:
        quad = corners
    small = np.array(quad, np.uint8).reshape(2, 2, 3)
    size = (width, height)
    return Ground(cv2.resize(small, size, interpolation=cv2.INTER_LINEAR), corners, None)


def _texture(rng: random.Random, height: int, width: int) -> Ground:
    """Clouds of several scales around one colour: what a blurred photograph looks like."""
    base = _any_color(rng)
    generator = np.random.default_rng(rng.getrandbits(32))
    half = (width // 2, height // 2)
    total = np.zeros((half[1], half[0], 3), np.int16) + np.array(base, np.int16)
    amplitude = rng.choice((14, 24, 34))
    for cells in rng.sample((3, 6, 12, 24, 60), rng.randint(1, 3)):
        wide = max(2, cells * width // max(height, width))
        high = max(2, cells * height // max(height, width))
        channels = 3 if rng.random() < 0.6 else 1
        small = generator.integers(0, 2 * amplitude, (high, wide, channels), dtype=np.uint8)
        grown = cv2.resize(small, half, interpolation=cv2.INTER_CUBIC)
        total += grown.reshape(half[1], half[0], channels).astype(np.int16) - amplitude
        amplitude = max(6, amplitude * 2 // 3)
    low: Color = tuple(max(0, part - 30) for part in base)  # type: ignore[assignment]
    high_: Color = tuple(min(255, part + 30) for part in base)  # type: ignore[assignment]
    pixels = cv2.resize(np.clip(total, 0, 255).astype(np.uint8), (width, height))
    return Ground(pixels, [base, low, high_], None)


def _pattern(rng: random.Random, height: int, width: int) -> Ground:
    base = _any_color(rng)
    away = rng.choice((-1, 1)) * rng.randint(10, 32)
    ink: Color = tuple(min(255, max(0, part + away)) for part in base)  # type: ignore[assignment]
    picture = _solid(height, width, base)
    step = rng.randint(12, 60)
    kind = rng.choice(("grid", "rows", "checks", "dots", "lines"))
    if kind in ("grid", "lines"):
        for x in range(rng.randrange(step), width, step):
            picture[:, x : x + rng.choice((1, 1, 2))] = ink
    if kind in ("grid", "rows"):
        band = 1 if kind == "grid" else step // 2
        for y in range(rng.randrange(step), height, step):
            picture[y : y + band] = ink
    if kind == "checks":
        yy, xx = np.arange(height) // step, np.arange(width) // step
        picture[(yy[:, None] + xx[None]) % 2 == 1] = ink
    if kind == "dots":
        for y in range(step // 2, height, step):
            for x in range(step // 2, width, step):
                cv2.circle(picture, (x, y), 2, ink, -1)
    return Ground(picture, [base, ink], None)


def ground(rng: random.Random, height: int, width: int, plain: float = 0.5) -> Ground:
    """A background; `plain` is the share of solid, nameable ones."""
    kind = rng.random()
    if kind < plain:
        return _named_ground(rng, height, width)
    kind = rng.random()
    if kind < 0.30:
        color = _any_color(rng)
        return Ground(_solid(height, width, color), [color], None)
    if kind < 0.52:
        return _gradient(rng, height, width)
    if kind < 0.82:
        return _texture(rng, height, width)
    return _pattern(rng, height, width)


def outline(rng: random.Random, shape: str) -> NDArray[np.float64]:
    """(points, 2): the polygon of a shape within the unit circle, upright; circles have many."""
    if shape == "square":
        return np.array(((-1, -1), (1, -1), (1, 1), (-1, 1))) * 0.78
    if shape == "rectangle":
        high = rng.uniform(0.35, 0.62)
        box = np.array(((-1, -high), (1, -high), (1, high), (-1, high))) * 0.9
        return box if rng.random() < 0.7 else box[:, ::-1]
    if shape == "triangle":
        kind = rng.random()
        if kind < 0.62:
            return np.array(((0, -1), (0.866, 0.5), (-0.866, 0.5)))
        if kind < 0.88:
            wide, high = rng.uniform(0.55, 0.95), rng.uniform(0.6, 1.0)
            return np.array(((0, -high), (wide, high * 0.8), (-wide, high * 0.8)))
        return np.array(((-0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)))
    if shape == "star":
        points = rng.choice((5, 5, 5, 5, 5, 5, 5, 5, 6, 4))
        inner = rng.uniform(0.36, 0.52) if points == 5 else rng.uniform(0.3, 0.5)
        if points == 5 and rng.random() < 0.3:
            inner = 0.382
        angles = np.arange(2 * points) * math.pi / points - math.pi / 2
        radius = np.where(np.arange(2 * points) % 2 == 0, 1.0, inner)
        return np.stack((np.cos(angles) * radius, np.sin(angles) * radius), axis=1)
    angles = np.linspace(0, 2 * math.pi, 72, endpoint=False)
    return np.stack((np.cos(angles), np.sin(angles)), axis=1)


def turn(rng: random.Random, shape: str) -> float:
    """Degrees to rotate a shape by: mostly upright."""
    if shape == "circle":
        return 0.0
    kind = rng.random()
    if kind < 0.62:
        return 0.0
    if shape == "square":
        return rng.uniform(-22, 22) if kind < 0.93 else rng.uniform(-45, 45)
    if shape == "rectangle":
        return rng.uniform(-25, 25)
    return rng.uniform(-30, 30) if kind < 0.85 else rng.uniform(0, 360)


@dataclass
class Look:
    """How the shapes of a scene are drawn."""

    smooth: bool
    hollow: float
    rim: Color | None
    rim_width: float
    shadow: bool
    gloss: bool


def look(rng: random.Random) -> Look:
    kind = rng.random()
    rim: Color | None = None
    if 0.14 < kind < 0.30:
        rim = (0, 0, 0) if rng.random() < 0.6 else rng.choice(((255, 255, 255), (60, 60, 60)))
    return Look(
        smooth=rng.random() < 0.65,
        hollow=rng.uniform(0.08, 0.3) if kind < 0.11 else 0.0,
        rim=rim,
        rim_width=rng.uniform(0.02, 0.1),
        shadow=rng.random() < 0.07,
        gloss=rng.random() < 0.06,
    )


def draw_polygon(
    picture: Picture, points: NDArray[np.float64], radius: float, color: Color, style: Look
) -> None:
    """points: (n, 2) in pixels."""
    line = cv2.LINE_AA if style.smooth else cv2.LINE_8
    if style.shadow:
        offset = max(2.0, radius * 0.12)
        _shade_under(picture, points + offset, 0.55)
    fixed = np.round(points * SUBPIXEL).astype(np.int32).reshape(-1, 1, 2)
    if style.hollow:
        width = max(2, round(radius * style.hollow))
        cv2.polylines(picture, [fixed], True, color, width, line, SHIFT)
        return
    cv2.fillPoly(picture, [fixed], color, line, SHIFT)
    if style.gloss:
        _gloss(picture, points)
    if style.rim is not None and distance(style.rim, color) > 120:
        width = max(1, round(radius * style.rim_width))
        cv2.polylines(picture, [fixed], True, style.rim, width, line, SHIFT)


def _region(picture: Picture, points: NDArray[np.float64]) -> tuple[slice, slice, Mask]:
    height, width = picture.shape[:2]
    left, top = np.maximum(np.floor(points.min(axis=0)).astype(int), 0)
    right, bottom = np.ceil(points.max(axis=0)).astype(int) + 1
    right, bottom = min(int(right), width), min(int(bottom), height)
    mask = np.zeros((max(0, bottom - top), max(0, right - left)), np.uint8)
    if mask.size:
        fixed = np.round((points - (left, top)) * SUBPIXEL).astype(np.int32).reshape(-1, 1, 2)
        cv2.fillPoly(mask, [fixed], 255, cv2.LINE_AA, SHIFT)
    return slice(int(top), bottom), slice(int(left), right), mask


def _shade_under(picture: Picture, points: NDArray[np.float64], keep: float) -> None:
    rows, cols, mask = _region(picture, points)
    if mask.size:
        part = picture[rows, cols]
        part[mask > 127] = (part[mask > 127] * keep).astype(np.uint8)


def _gloss(picture: Picture, points: NDArray[np.float64]) -> None:
    """A slight change of light from the top of a shape to its bottom."""
    rows, cols, mask = _region(picture, points)
    if mask.size:
        light = np.linspace(1.12, 0.82, mask.shape[0])[:, None, None]
        lit = np.clip(picture[rows, cols] * light, 0, 255).astype(np.uint8)
        inside = mask > 250
        picture[rows, cols][inside] = lit[inside]


def place_polygon(
    shape: NDArray[np.float64], center: tuple[float, float], radius: float, degrees: float
) -> NDArray[np.float64]:
    if degrees:
        angle = math.radians(degrees)
        spin = np.array(((math.cos(angle), math.sin(angle)), (-math.sin(angle), math.cos(angle))))
        shape = shape @ spin
    return shape * radius + np.array(center)


def rotate_mask(mask: Mask, degrees: float) -> Mask:
    """The mask turned about its centre, grown to hold its corners."""
    height, width = mask.shape
    angle = math.radians(degrees)
    wide = int(abs(width * math.cos(angle)) + abs(height * math.sin(angle))) + 3
    high = int(abs(width * math.sin(angle)) + abs(height * math.cos(angle))) + 3
    matrix = cv2.getRotationMatrix2D((width / 2, height / 2), degrees, 1.0)
    matrix[:, 2] += ((wide - width) / 2, (high - height) / 2)
    return cv2.warpAffine(mask, matrix, (wide, high), flags=cv2.INTER_LINEAR)


def blend(picture: Picture, mask: Mask, left: int, top: int, color: Color) -> None:
    """Paint `color` through the mask, clipped at the picture's edges."""
    height, width = picture.shape[:2]
    x0, y0 = max(0, left), max(0, top)
    x1, y1 = min(width, left + mask.shape[1]), min(height, top + mask.shape[0])
    if x0 >= x1 or y0 >= y1:
        return
    alpha = mask[y0 - top : y1 - top, x0 - left : x1 - left].astype(np.uint16)[..., None]
    part = picture[y0:y1, x0:x1]
    ink = np.array(color, np.uint16)
    part[:] = ((part * (255 - alpha) + ink * alpha + 127) // 255).astype(np.uint8)


def text_color(rng: random.Random, behind: list[Color]) -> tuple[str, Color]:
    """A colour in which a text can be read on all those behind it."""
    mean = sum(luminance(c) for c in behind) / len(behind)
    for _ in range(30):
        plain = "black" if mean > 128 else "white"
        name = plain if rng.random() < 0.35 else pick_name(rng)
        color = shade(rng, name)
        far = all(distance(color, c) > 170 for c in behind)
        if far and all(abs(luminance(color) - luminance(c)) > 45 for c in behind):
            return name, color
    return ("black", (0, 0, 0)) if mean > 128 else ("white", (255, 255, 255))
