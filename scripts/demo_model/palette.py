"""Named colours: the shades people call by each name, and when two can be told apart."""

from __future__ import annotations

import random

Color = tuple[int, int, int]

ANCHORS: dict[str, tuple[Color, ...]] = {
    "red": (
        (255, 0, 0),
        (255, 0, 0),
        (220, 20, 60),
        (214, 39, 40),
        (229, 57, 53),
        (244, 67, 54),
        (231, 76, 60),
        (239, 68, 68),
        (200, 0, 0),
        (178, 34, 34),
        (139, 0, 0),
        (211, 47, 47),
        (192, 57, 43),
        (220, 38, 38),
        (230, 30, 30),
        (204, 0, 0),
        (255, 59, 48),
    ),
    "orange": (
        (255, 165, 0),
        (255, 165, 0),
        (255, 140, 0),
        (255, 127, 14),
        (255, 152, 0),
        (251, 140, 0),
        (245, 124, 0),
        (230, 126, 34),
        (243, 156, 18),
        (249, 115, 22),
        (255, 128, 0),
        (240, 130, 30),
        (255, 149, 0),
    ),
    "yellow": (
        (255, 255, 0),
        (255, 255, 0),
        (255, 235, 59),
        (253, 216, 53),
        (255, 215, 0),
        (250, 204, 21),
        (241, 196, 15),
        (255, 241, 118),
        (240, 230, 50),
        (255, 230, 0),
        (255, 221, 51),
        (234, 220, 30),
    ),
    "green": (
        (0, 128, 0),
        (0, 128, 0),
        (0, 255, 0),
        (44, 160, 44),
        (76, 175, 80),
        (67, 160, 71),
        (46, 204, 113),
        (39, 174, 96),
        (34, 139, 34),
        (0, 100, 0),
        (50, 205, 50),
        (34, 197, 94),
        (22, 163, 74),
        (0, 200, 80),
        (27, 94, 32),
        (46, 139, 87),
        (60, 180, 75),
        (0, 170, 0),
        (102, 187, 106),
        (52, 199, 89),
        (124, 200, 60),
        (144, 238, 144),
    ),
    "blue": (
        (0, 0, 255),
        (0, 0, 255),
        (31, 119, 180),
        (30, 144, 255),
        (65, 105, 225),
        (33, 150, 243),
        (25, 118, 210),
        (52, 152, 219),
        (41, 128, 185),
        (59, 130, 246),
        (37, 99, 235),
        (0, 0, 139),
        (0, 0, 128),
        (70, 130, 180),
        (0, 90, 200),
        (40, 60, 220),
        (0, 122, 255),
        (13, 71, 161),
        (100, 149, 237),
        (0, 191, 255),
        (135, 206, 235),
    ),
    "purple": (
        (128, 0, 128),
        (128, 0, 128),
        (148, 103, 189),
        (156, 39, 176),
        (142, 36, 170),
        (155, 89, 182),
        (142, 68, 173),
        (102, 51, 153),
        (138, 43, 226),
        (160, 32, 240),
        (168, 85, 247),
        (147, 51, 234),
        (75, 0, 130),
        (103, 58, 183),
        (148, 0, 211),
        (175, 82, 222),
        (123, 31, 162),
        (153, 50, 204),
    ),
    "black": ((0, 0, 0), (0, 0, 0), (17, 17, 17), (26, 26, 26), (33, 33, 33), (10, 10, 14)),
    "white": ((255, 255, 255), (255, 255, 255), (250, 250, 250), (245, 245, 245), (240, 240, 240)),
    "pink": (
        (255, 192, 203),
        (255, 105, 180),
        (255, 182, 193),
        (227, 119, 194),
        (244, 143, 177),
        (236, 64, 122),
        (255, 130, 190),
        (236, 72, 153),
    ),
    "brown": (
        (139, 69, 19),
        (140, 86, 75),
        (121, 85, 72),
        (160, 82, 45),
        (101, 67, 33),
        (109, 76, 65),
        (120, 63, 4),
        (150, 75, 0),
    ),
    "gray": ((128, 128, 128), (127, 127, 127), (158, 158, 158), (105, 105, 105), (149, 155, 160)),
}
NAMED = ("red", "orange", "yellow", "green", "blue", "purple", "black", "white")
EXTRA = ("pink", "brown", "gray")
# Pairs too near to share a scene where the name decides.
NEIGHBOURS = {
    frozenset(pair)
    for pair in (
        ("red", "orange"),
        ("red", "brown"),
        ("orange", "brown"),
        ("pink", "purple"),
        ("gray", "white"),
        ("gray", "black"),
        ("yellow", "orange"),
        ("pink", "red"),
    )
}


def shade(rng: random.Random, name: str) -> Color:
    """A shade of that name: an anchor, most often a little off."""
    anchor = rng.choice(ANCHORS[name])
    if rng.random() < 0.4:
        return anchor
    spread = 6 if name in ("black", "white", "gray") else 12
    common = rng.randint(-spread, spread) if name in ("black", "white", "gray") else 0
    r, g, b = (
        min(255, max(0, part + common + rng.randint(-spread, spread) // (4 if common else 1)))
        for part in anchor
    )
    return (r, g, b)


def distance(a: Color, b: Color) -> float:
    """How far apart two colours look: the 'redmean' approximation, 0 to about 765."""
    mean = (a[0] + b[0]) / 2
    r, g, b_ = (a[i] - b[i] for i in range(3))
    return float(((2 + mean / 256) * r * r + 4 * g * g + (2 + (255 - mean) / 256) * b_ * b_) ** 0.5)


def luminance(color: Color) -> float:
    return 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]


def pick_name(rng: random.Random, extras: float = 0.12) -> str:
    return rng.choice(EXTRA) if rng.random() < extras else rng.choice(NAMED)


def visible_shade(
    rng: random.Random, behind: list[Color], least: float, names: tuple[str, ...] | None = None
) -> tuple[str, Color]:
    """A (name, shade) at least that far from every colour behind it."""
    for _ in range(40):
        name = rng.choice(names) if names else pick_name(rng)
        color = shade(rng, name)
        if all(distance(color, other) >= least for other in behind):
            return name, color
    best = max(
        ("black", "white", "yellow", "blue"),
        key=lambda n: min(distance(ANCHORS[n][0], other) for other in behind),
    )
    return best, ANCHORS[best][0]
