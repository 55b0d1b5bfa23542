"""Named colours: the shades people call by each name, and when two can be told apart."""

from __future__ import annotations

import random

Color = tuple[int, int, int]


def _color(digits: str) -> Color:
    red, green, blue = bytes.fromhex(digits)
    return red, green, blue


_SHADES = {
    "red": (
        "ff0000 ff0000 dc143c d62728 e53935 f44336 e74c3c ef4444 c80000 b22222 8b0000 d32f2f "
        "c0392b dc2626 e61e1e cc0000 ff3b30"
    ),
    "orange": (
        "ffa500 ffa500 ff8c00 ff7f0e ff9800 fb8c00 f57c00 e67e22 f39c12 f97316 ff8000 f0821e ff9500"
    ),
    "yellow": "ffff00 ffff00 ffeb3b fdd835 ffd700 facc15 f1c40f fff176 f0e632 ffe600 ffdd33 eadc1e",
    "green": (
        "008000 008000 00ff00 2ca02c 4caf50 43a047 2ecc71 27ae60 228b22 006400 32cd32 22c55e "
        "16a34a 00c850 1b5e20 2e8b57 3cb44b 00aa00 66bb6a 34c759 7cc83c 90ee90"
    ),
    "blue": (
        "0000ff 0000ff 1f77b4 1e90ff 4169e1 2196f3 1976d2 3498db 2980b9 3b82f6 2563eb 00008b "
        "000080 4682b4 005ac8 283cdc 007aff 0d47a1 6495ed 00bfff 87ceeb"
    ),
    "purple": (
        "800080 800080 9467bd 9c27b0 8e24aa 9b59b6 8e44ad 663399 8a2be2 a020f0 a855f7 9333ea "
        "4b0082 673ab7 9400d3 af52de 7b1fa2 9932cc"
    ),
    "black": "000000 000000 111111 1a1a1a 212121 0a0a0e",
    "white": "ffffff ffffff fafafa f5f5f5 f0f0f0",
    "pink": "ffc0cb ff69b4 ffb6c1 e377c2 f48fb1 ec407a ff82be ec4899",
    "brown": "8b4513 8c564b 795548 a0522d 654321 6d4c41 783f04 964b00",
    "gray": "808080 7f7f7f 9e9e9e 696969 959ba0",
}
ANCHORS: dict[str, tuple[Color, ...]] = {
    name: tuple(_color(shade) for shade in shades.split()) for name, shades in _SHADES.items()
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
