"""What stands in a picture, and its drawing. Knows shapes, words and places; no questions."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import cv2

from demo_model.drawing import (
    Ground,
    Look,
    Picture,
    blend,
    draw_polygon,
    ground,
    look,
    outline,
    place_polygon,
    rotate_mask,
    text_color,
    turn,
)
from demo_model.fonts import FontBook, Words, text_mask
from demo_model.palette import NAMED, NEIGHBOURS, Color, distance, visible_shade
from demo_model.shape import MAX_PIXELS

SHAPES = ("circle", "square", "triangle", "star")
SMALLEST_TEXT = 16
"""Pixels of a font, as the model sees it: smaller texts can't be read."""
LEFT, MIDDLE, RIGHT = (0.0, 0.34), (0.40, 0.60), (0.66, 1.0)


def third(at: float, names: tuple[str, str, str]) -> str | None:
    """Which third of the picture, or None between two."""
    for name, (low, high) in zip(names, (LEFT, MIDDLE, RIGHT), strict=True):
        if low <= at <= high:
            return name
    return None


@dataclass
class Thing:
    """A shape or a word; x, y, radius in fractions of width, height and the shorter side.

    `seed` fixes what else its drawing chooses, so that it looks alike in two pictures.
    """

    kind: str
    color: str
    ink: Color
    x: float
    y: float
    radius: float
    text: str = ""
    seed: int = 0

    @property
    def column(self) -> str | None:
        return third(self.x, ("left", "middle", "right"))

    @property
    def row(self) -> str | None:
        return third(self.y, ("top", "middle", "bottom"))

    @property
    def place(self) -> str | None:
        """'left', 'top right', 'middle' …, or None where people would not agree."""
        column, row = self.column, self.row
        if column is None or row is None:
            return None
        if row == "middle":
            return column
        return row if column == "middle" else f"{row} {column}"


@dataclass
class Scene:
    shapes: list[Thing] = field(default_factory=list)
    words: list[Thing] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    background: str | None = None
    ground: Ground | None = None
    look: Look | None = None


@dataclass
class Artist:
    """Draws scenes with its fonts and words; `ease` in 0..1 makes texts large and short."""

    fonts: FontBook
    words: Words
    ease: float = 0.0

    # --- shapes -------------------------------------------------------------

    def shape_scene(self, rng: random.Random, height: int, width: int, plan: str) -> Scene:
        """plan: 'one', 'few' (differing things), 'many' or 'groups' (for counting)."""
        back = ground(rng, height, width)
        scene = Scene(background=back.name, ground=back, look=look(rng))
        if plan == "one":
            count = 1
        elif plan == "few":
            count = rng.choice((2, 2, 2, 3, 3, 4))
        else:
            count = rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 6))
        if plan == "groups":
            return self._groups(rng, scene, height, width)
        places = layout(rng, count, height, width)
        kinds = self._kinds(rng, plan, count)
        colors = self._colors(rng, back, plan, count)
        for (x, y, radius), kind, (name, ink) in zip(places, kinds, colors, strict=True):
            seed = rng.getrandbits(32)
            scene.shapes.append(Thing(kind, name, ink, x, y, radius, seed=seed))
        return scene

    def _groups(self, rng: random.Random, scene: Scene, height: int, width: int) -> Scene:
        """Several of one kind and colour, and one or two of another, or of two others."""
        assert scene.ground is not None
        sizes = [rng.choice((2, 3, 3, 3, 4, 4)), rng.choice((1, 1, 2))]
        if rng.random() < 0.35:
            sizes = [rng.choice((2, 2, 3)), 1, rng.choice((1, 1, 2))]
        kinds = rng.sample(SHAPES, len(sizes))
        if rng.random() < 0.2:
            kinds = [rng.choice(SHAPES)] * len(sizes)
        colors = self._colors(rng, scene.ground, "few", len(sizes))
        places = layout(rng, sum(sizes), height, width)
        rng.shuffle(places)
        groups = [group for group, size in enumerate(sizes) for _ in range(size)]
        for (x, y, radius), group in zip(places, groups, strict=True):
            name, ink = colors[group]
            seed = rng.getrandbits(32)
            scene.shapes.append(Thing(kinds[group], name, ink, x, y, radius, seed=seed))
        return scene

    def _kinds(self, rng: random.Random, plan: str, count: int) -> list[str]:
        if plan == "many" and rng.random() < 0.6:
            return [rng.choice(SHAPES)] * count
        if plan == "many":
            pool = rng.sample(SHAPES, 2)
            return [rng.choice(pool) for _ in range(count)]
        if plan == "few" and rng.random() < 0.7:
            return rng.sample(SHAPES, count)
        return [rng.choice(SHAPES) for _ in range(count)]

    def _colors(
        self, rng: random.Random, back: Ground, plan: str, count: int
    ) -> list[tuple[str, Color]]:
        if plan == "many" and rng.random() < 0.5:
            return [visible_shade(rng, back.colors, 150)] * count
        chosen: list[tuple[str, Color]] = []
        for _ in range(count):
            for _ in range(12):
                name, ink = visible_shade(rng, back.colors, 150)
                clash = any(frozenset((name, other)) in NEIGHBOURS for other, _ in chosen)
                if not clash and (rng.random() < 0.25 or name not in {n for n, _ in chosen}):
                    break
            same = [shade for other, shade in chosen if other == name]
            chosen.append((name, same[0] if same and rng.random() < 0.8 else ink))
        return chosen

    # --- words --------------------------------------------------------------

    def word_scene(self, rng: random.Random, height: int, width: int, count: int) -> Scene:
        """`count` words: one alone, or several on lines."""
        back = ground(rng, height, width, plain=0.6)
        scene = Scene(background=back.name, ground=back, look=look(rng))
        return self.write(rng, scene, count)

    def write(self, rng: random.Random, scene: Scene, count: int) -> Scene:
        longest = 8 if self.ease <= 0 else max(2, round(8 - 6 * self.ease))
        texts = [self.words.pick(rng, longest) for _ in range(count)]
        if count > 1 and rng.random() < 0.35:
            scene.lines = [" ".join(texts[i : i + 2]) for i in range(0, count, 2)]
        else:
            scene.lines = texts
        return scene

    # --- drawing ------------------------------------------------------------

    def draw(self, rng: random.Random, scene: Scene, height: int, width: int) -> Picture:
        """Draws everything; fills in where its words came to stand."""
        assert scene.ground is not None
        assert scene.look is not None
        picture = scene.ground.pixels.copy()
        for thing in scene.shapes:
            self._draw_shape(picture, thing, scene.look)
        if scene.lines:
            self._draw_lines(rng, picture, scene)
        return picture

    def _draw_shape(self, picture: Picture, thing: Thing, style: Look) -> None:
        rng = random.Random(thing.seed)
        height, width = picture.shape[:2]
        radius = thing.radius * min(height, width)
        points = place_polygon(
            outline(rng, thing.kind), (thing.x * width, thing.y * height), radius,
            turn(rng, thing.kind),
        )  # fmt: skip
        draw_polygon(picture, points, radius, thing.ink, style)

    def _draw_lines(self, rng: random.Random, picture: Picture, scene: Scene) -> None:
        assert scene.ground is not None
        height, width = picture.shape[:2]
        font = self.fonts.pick(rng)
        boxes = free_boxes(rng, scene, len(scene.lines))
        seen = min(1.0, math.sqrt(MAX_PIXELS / (height * width)))
        size = 0
        name, ink = "", (0, 0, 0)
        mixed = len(scene.lines) > 1 and rng.random() < 0.4
        for text, box in zip(scene.lines, boxes, strict=True):
            room = ((box[2] - box[0]) * width, (box[3] - box[1]) * height)
            size = size if size and not mixed else self._font_size(rng, text, *room, seen)
            if not name or mixed:
                name, ink = text_color(rng, scene.ground.colors)
            self._draw_text(rng, picture, scene, (text, font, size), box, (name, ink))

    def _font_size(
        self, rng: random.Random, text: str, wide: float, high: float, seen: float
    ) -> int:
        """Pixels, in a picture that the model is shown at `seen` times its size."""
        largest = max(SMALLEST_TEXT / seen, min(1.6 * wide / max(1, len(text)), 0.95 * high))
        smallest = (SMALLEST_TEXT + self.ease * 30) / seen
        if largest <= smallest:
            return int(largest)
        kind = rng.random()
        top = largest if kind < 0.3 else min(largest, 96.0) if kind < 0.7 else min(largest, 40.0)
        return int(math.exp(rng.uniform(math.log(smallest), math.log(max(top, smallest)))))

    def _draw_text(
        self,
        rng: random.Random,
        picture: Picture,
        scene: Scene,
        words: tuple[str, str, int],
        box: tuple[float, float, float, float],
        paint: tuple[str, Color],
    ) -> None:
        text, font, size = words
        name, ink = paint
        height, width = picture.shape[:2]
        left, top, right, bottom = (
            box[0] * width, box[1] * height, box[2] * width, box[3] * height
        )  # fmt: skip
        smooth = rng.random() < 0.9 or size < 16
        mask = text_mask(font, size, text, smooth=smooth, stroke=int(rng.random() < 0.04))
        if mask.shape[1] > (right - left) * 0.97 or mask.shape[0] > (bottom - top):
            ratio = min((right - left) * 0.95 / mask.shape[1], (bottom - top) / mask.shape[0])
            size = max(9, int(size * ratio))
            mask = text_mask(font, size, text, smooth=True)
        if rng.random() < 0.16:
            mask = rotate_mask(mask, rng.uniform(-9, 9))
        high, wide = mask.shape
        x = int(rng.uniform(left, max(left, right - wide)))
        y = int(rng.uniform(top, max(top, bottom - high)))
        if rng.random() < 0.45:
            x = int((left + right - wide) / 2)
        if rng.random() < 0.35:
            y = int((top + bottom - high) / 2)
        if rng.random() < 0.10:
            name, ink = self._label(rng, picture, (x, y, wide, high))
        elif rng.random() < 0.05:
            blend(picture, mask, x + 1 + size // 24, y + 1 + size // 24, (90, 90, 90))
        blend(picture, mask, x, y, ink)
        for part in text.split(" "):
            scene.words.append(
                Thing("text", name, ink, (x + wide / 2) / width, (y + high / 2) / height, 0, part)
            )

    def _label(
        self, rng: random.Random, picture: Picture, box: tuple[int, int, int, int]
    ) -> tuple[str, Color]:
        """A button or sign behind the text; returns the text's new colour."""
        x, y, wide, high = box
        pad = max(3, high // 3)
        _, fill = visible_shade(rng, [(255, 255, 255)], 0)
        start, end = (x - pad, y - pad), (x + wide + pad, y + high + pad)
        cv2.rectangle(picture, start, end, fill, -1)
        if rng.random() < 0.4:
            edge = (0, 0, 0) if sum(fill) > 300 else (230, 230, 230)
            cv2.rectangle(picture, start, end, edge, rng.choice((1, 2)))
        return text_color(rng, [fill])


Box = tuple[float, float, float, float]


def layout(
    rng: random.Random, count: int, height: int, width: int
) -> list[tuple[float, float, float]]:
    """Where `count` shapes stand: (x, y, radius), none touching another or the border."""
    kind = rng.random()
    if count == 1:
        return [_alone(rng, height, width)]
    if kind < 0.35 and count <= 5:
        return _in_line(rng, count, height, width)
    short = min(height, width)
    for attempt in range(60):
        largest = min(0.30, 0.75 / count**0.75) * (0.985**attempt)
        placed: list[tuple[float, float, float]] = []
        alike = rng.random() < 0.5
        radius = rng.uniform(0.055, largest)
        for _ in range(count):
            radius = radius if alike else rng.uniform(0.055, largest)
            if spot := _spot(rng, placed, radius, (width / short, height / short), kind < 0.7):
                placed.append(spot)
        if len(placed) == count:
            return placed
    return _in_line(rng, count, height, width)


def _cell(rng: random.Random, margin: float) -> float:
    low, high = rng.choice((LEFT, MIDDLE, RIGHT))
    low, high = max(low, margin), min(high, 1 - margin)
    return rng.uniform(low, high) if low < high else min(max(0.5, low), high)


def _spot(
    rng: random.Random,
    placed: list[tuple[float, float, float]],
    radius: float,
    scale: tuple[float, float],
    cells: bool,
) -> tuple[float, float, float] | None:
    across, down = radius / scale[0] * 1.05, radius / scale[1] * 1.05
    for _ in range(14):
        if cells:
            x, y = _cell(rng, across), _cell(rng, down)
        else:
            x, y = rng.uniform(across, 1 - across), rng.uniform(down, 1 - down)
        clear = all(
            math.hypot((x - ox) * scale[0], (y - oy) * scale[1]) > (radius + other) * 1.08 + 0.012
            for ox, oy, other in placed
        )
        if clear and across <= x <= 1 - across and down <= y <= 1 - down:
            return x, y, radius
    return None


def _alone(rng: random.Random, height: int, width: int) -> tuple[float, float, float]:
    short = min(height, width)
    kind = rng.random()
    if kind < 0.35:
        radius = rng.uniform(0.12, 0.47)
        return 0.5 + rng.uniform(-0.02, 0.02), 0.5 + rng.uniform(-0.02, 0.02), radius
    radius = math.exp(rng.uniform(math.log(0.06), math.log(0.30)))
    across, down = radius * short / width * 1.03, radius * short / height * 1.03
    if kind < 0.8:
        return _cell(rng, across), _cell(rng, down), radius
    return rng.uniform(across, 1 - across), rng.uniform(down, 1 - down), radius


def _in_line(
    rng: random.Random, count: int, height: int, width: int
) -> list[tuple[float, float, float]]:
    """Evenly spaced in a row, or in a column, most often through the middle."""
    short = min(height, width)
    along = rng.random() < 0.75
    length = (width if along else height) / short
    radius = rng.uniform(0.055, min(0.30, 0.46 * length / count))
    side = (height if along else width) / short
    middle = 0.5
    if rng.random() < 0.4:
        middle = rng.uniform(radius / side * 1.05, 1 - radius / side * 1.05)
    step = 1 / count
    if rng.random() < 0.3:
        step = max(2.2 * radius / length, rng.uniform(0.7, 1.0) / count)
    spots = [(0.5 + (i - (count - 1) / 2) * step, middle) for i in range(count)]
    return [(x, y, radius) if along else (y, x, radius) for x, y in spots]


def free_boxes(rng: random.Random, scene: Scene, lines: int) -> list[Box]:
    """Regions for lines of text: clear of the shapes, one under another."""
    left, top, right, bottom = 0.02, 0.02, 0.98, 0.98
    if scene.shapes:
        low = min(t.y - t.radius * 1.1 for t in scene.shapes)
        high = max(t.y + t.radius * 1.1 for t in scene.shapes)
        if low > 1 - high:
            bottom = max(0.12, low)
        else:
            top = min(0.88, high)
    elif rng.random() < 0.3:
        edge = rng.uniform(0.0, 0.45)
        if rng.random() < 0.5:
            top += edge if rng.random() < 0.5 else 0
            bottom = bottom - edge if top < 0.03 else bottom
        else:
            left += edge if rng.random() < 0.5 else 0
            right = right - edge if left < 0.03 else right
    step = (bottom - top) / lines
    return [(left, top + i * step, right, top + (i + 0.92) * step) for i in range(lines)]


def moved(thing: Thing, x: float, y: float) -> Thing:
    return replace(thing, x=x, y=y)


def recolored(rng: random.Random, thing: Thing, behind: list[Color]) -> Thing:
    for _ in range(20):
        name, ink = visible_shade(rng, behind, 150, NAMED)
        near = frozenset((name, thing.color)) in NEIGHBOURS
        if name != thing.color and not near and distance(ink, thing.ink) > 150:
            return replace(thing, color=name, ink=ink)
    return thing
