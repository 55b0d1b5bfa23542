# ruff: noqa: E501 - wordings stand on one line each
"""Cases drawn and worded by other code than the training's: Pillow, supersampled, CSS colours.

Shares no drawing, palette or phrasing with `drawing`, `scenes` and `phrases`.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFilter, ImageFont

from demo_model.cases import Case, Step

SIZES = (
    (448, 448), (224, 224), (640, 480), (480, 640), (1920, 1080), (300, 200), (1024, 1024),
    (512, 512), (800, 600), (600, 200), (256, 256), (1280, 720), (390, 844), (320, 240),
)  # fmt: skip
CSS = {
    "red": ("red", "crimson", "firebrick", "#d62728", "#e53935", "#cc0000"),
    "orange": ("orange", "darkorange", "#ff7f0e", "#fb8c00", "#f39c12"),
    "yellow": ("yellow", "gold", "#fdd835", "#f1c40f", "#ffeb3b"),
    "green": ("green", "lime", "forestgreen", "limegreen", "#2ca02c", "#43a047", "seagreen"),
    "blue": ("blue", "royalblue", "dodgerblue", "#1f77b4", "#1e88e5", "navy", "mediumblue"),
    "purple": ("purple", "rebeccapurple", "darkviolet", "#9467bd", "#8e24aa", "blueviolet"),
    "black": ("black", "#111111", "#202020"),
    "white": ("white", "#fafafa", "snow"),
}
SHAPES = ("circle", "square", "triangle", "star")
SPOTS = {
    "left": (0.2, 0.5), "right": (0.8, 0.5), "top": (0.5, 0.2), "bottom": (0.5, 0.8),
    "middle": (0.5, 0.5), "top left": (0.2, 0.2), "top right": (0.8, 0.2),
    "bottom left": (0.2, 0.8), "bottom right": (0.8, 0.8),
}  # fmt: skip
WORDS = (
    "Invoice", "HELLO", "Total", "STOP", "Welcome", "error", "Login", "4711", "2024", "12.50",
    "Berlin", "MENU", "Submit", "Cancel", "coffee", "Paris", "EXIT", "098", "Settings", "Friday",
    "7B", "window", "KEYBOARD", "Order", "Paid", "pixel", "Robot", "99", "SALE", "Checkout",
    "zebra", "Planet", "QUIET", "jump", "Fox", "31415", "VOLUME", "Draft", "Inbox", "Delete",
)  # fmt: skip
Rgb = tuple[int, int, int]


def rgb(name: str) -> Rgb:
    return ImageColor.getrgb(name)[:3]  # type: ignore[return-value]


def apart(a: Rgb, b: Rgb) -> bool:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) > 190


class OtherArtist:
    """Draws at three times the size and scales down, so that every edge is smooth."""

    def __init__(self, rng: random.Random, fonts: list[str]) -> None:
        self.rng = rng
        self.fonts = fonts
        self.size = rng.choice(SIZES)
        self.scale = 3 if self.size[0] * self.size[1] < 400_000 else 1
        self.back, self.image = self._background()
        self.draw = ImageDraw.Draw(self.image)

    def _background(self) -> tuple[list[Rgb], Image.Image]:
        rng = self.rng
        wide, high = (part * self.scale for part in self.size)
        kind = rng.choice(("white", "white", "solid", "gradient", "noise", "blobs", "dark"))
        if kind == "white":
            return [(255, 255, 255)], Image.new("RGB", (wide, high), "white")
        a: Rgb = rgb(
            rng.choice(("lavender", "beige", "lightgray", "aliceblue", "honeydew", "khaki"))
        )
        if kind == "dark":
            a = rgb(rng.choice(("midnightblue", "#222222", "darkslategray", "#1e1e2e", "black")))
        if kind in ("solid", "dark"):
            return [a], Image.new("RGB", (wide, high), a)
        if kind == "gradient":
            b = rgb(rng.choice(("white", "lightblue", "wheat", "thistle")))
            ramp = Image.linear_gradient("L").resize((wide, high))
            return [a, b], Image.composite(
                Image.new("RGB", (wide, high), a), Image.new("RGB", (wide, high), b), ramp
            )
        generator = np.random.default_rng(rng.getrandbits(32))
        cells = (high // self.scale, wide // self.scale) if kind == "noise" else (8, 8)
        grain = generator.normal(0, 14, (*cells, 3)) + np.array(a)
        small = Image.fromarray(np.clip(grain, 0, 255).astype(np.uint8))
        return [a], small.resize((wide, high), Image.Resampling.BILINEAR)

    def color(self, name: str | None = None, avoid: tuple[str, ...] = ()) -> tuple[str, Rgb]:
        for _ in range(200):
            chosen = name or self.rng.choice([c for c in CSS if c not in avoid])
            value = rgb(self.rng.choice(CSS[chosen]))
            if all(apart(value, other) for other in self.back):
                return chosen, value
        return "black", (0, 0, 0)

    def shape(self, kind: str, at: tuple[float, float], radius: float, ink: Rgb) -> None:
        """radius: a share of the shorter side."""
        wide, high = self.image.size
        x, y, r = at[0] * wide, at[1] * high, radius * min(wide, high)
        edge = self.rng.choice((None, None, None, "black", "#444444"))
        line = max(1, int(r / 18))
        if kind == "circle":
            self.draw.ellipse((x - r, y - r, x + r, y + r), ink, edge, line)
        elif kind == "square":
            self.draw.rectangle(
                (x - 0.85 * r, y - 0.85 * r, x + 0.85 * r, y + 0.85 * r), ink, edge, line
            )
        else:
            points = 3 if kind == "triangle" else 10
            tilt = self.rng.choice((0.0, 0.0, self.rng.uniform(-0.35, 0.35)))
            corners = []
            for i in range(points):
                reach = r if kind == "triangle" or i % 2 == 0 else 0.42 * r
                angle = tilt - math.pi / 2 + 2 * math.pi * i / points
                corners.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
            self.draw.polygon(corners, ink, edge, line)

    def text(self, text: str, at: tuple[float, float], height: float, ink: Rgb) -> None:
        """height: of the font, in pixels of the model's own resolution."""
        path = self.rng.choice(self.fonts)
        seen = min(1.0, math.sqrt(448 * 448 / (self.size[0] * self.size[1])))
        size = height * self.scale / seen
        room = 0.92 * self.image.size[0]
        font = _font(path, size)
        if (length := font.getlength(text)) > room:
            font = _font(path, size * room / length)
        half = font.getlength(text) / 2
        x = min(max(at[0] * self.image.size[0], half + 4), self.image.size[0] - half - 4)
        self.draw.text((x, at[1] * self.image.size[1]), text, ink, font, anchor="mm")

    def picture(self) -> np.ndarray:
        image = self.image.resize(self.size, Image.Resampling.LANCZOS)
        kind = self.rng.random()
        if kind < 0.2:
            stream = io.BytesIO()
            image.save(stream, "JPEG", quality=self.rng.randint(50, 90))
            image = Image.open(stream).convert("RGB")
        elif kind < 0.25:
            image = image.filter(ImageFilter.GaussianBlur(0.6))
        return np.asarray(image)


def _font(path: str, size: float) -> ImageFont.FreeTypeFont:
    if not path:
        return ImageFont.load_default(size)  # type: ignore[return-value]
    return ImageFont.truetype(path, size)


Maker = Callable[[random.Random, list[str]], Case]


def one(category: str, text: str, answer: str, artist: OtherArtist) -> Case:
    return Case(None, [Step([artist.picture(), text], (answer,), category)])


def shape_case(rng: random.Random, fonts: list[str]) -> Case:
    artist, kind = OtherArtist(rng, fonts), rng.choice(SHAPES)
    artist.shape(kind, rng.choice(list(SPOTS.values())), rng.uniform(0.08, 0.19), artist.color()[1])
    text = rng.choice((
        "Which shape is drawn in this picture?", "What shape do you see? One word.", "what shape is it",
        "Tell me which shape is in the image. Answer with one word.", "Which geometric shape is in the picture?",
        "Is the shape a circle, square, triangle or star? Answer with one word.",
    ))  # fmt: skip
    return one("shape", text, kind, artist)


def color_case(rng: random.Random, fonts: list[str]) -> Case:
    artist, kind = OtherArtist(rng, fonts), rng.choice(SHAPES)
    name, ink = artist.color()
    artist.shape(kind, rng.choice(list(SPOTS.values())), rng.uniform(0.08, 0.19), ink)
    text = rng.choice((
        f"What colour does the {kind} have? Reply with one word.", f"Which color is the {kind}?",
        "What color is the shape in this picture? Answer with just the color.", f"Give the colour of the {kind}.",
        "What colour is it?", f"The {kind} - what color is it? One word answer.",
    ))  # fmt: skip
    return one("color", text, name, artist)


def scatter(rng: random.Random, count: int) -> list[tuple[float, float]]:
    spots = [(0.17 + 0.33 * (i % 3), 0.17 + 0.33 * (i // 3)) for i in range(9)]
    return [
        (x + rng.uniform(-0.03, 0.03), y + rng.uniform(-0.03, 0.03))
        for x, y in rng.sample(spots, count)
    ]


def count_case(rng: random.Random, fonts: list[str]) -> Case:
    artist, kind, count = OtherArtist(rng, fonts), rng.choice(SHAPES), rng.randint(1, 4)
    name, ink = artist.color()
    spots = scatter(rng, count + 1)
    for spot in spots[:count]:
        artist.shape(kind, spot, rng.uniform(0.08, 0.125), ink)
    if rng.random() < 0.4:
        other = rng.choice([s for s in SHAPES if s != kind])
        artist.shape(other, spots[-1], 0.11, artist.color(avoid=(name,))[1])
        text = rng.choice(
            (
                f"How many {kind}s are in this image?",
                f"Count the {name} {kind}s. Answer with a number.",
            )
        )
    else:
        text = rng.choice(
            (
                f"How many {kind}s do you see?",
                "How many shapes are there in this image? Reply with a number.",
                f"Count the {kind}s in the picture please.",
            )
        )
    return one("count", text, str(count), artist)


def where_case(rng: random.Random, fonts: list[str]) -> Case:
    artist, kind = OtherArtist(rng, fonts), rng.choice(SHAPES)
    place = rng.choice(list(SPOTS))
    artist.shape(kind, SPOTS[place], rng.uniform(0.08, 0.16), artist.color()[1])
    text = rng.choice((
        f"Where is the {kind}?", f"Where in this image is the {kind}? Answer in one or two words.",
        f"Where is the {kind} located in the picture?", f"What is the position of the {kind}?", "Where is the shape?",
    ))  # fmt: skip
    return one("where", text, place, artist)


def yes_case(rng: random.Random, fonts: list[str]) -> Case:
    artist = OtherArtist(rng, fonts)
    kinds = rng.sample(SHAPES, 3)
    name, ink = artist.color()
    _, other_ink = artist.color(avoid=(name,))
    artist.shape(kinds[0], (0.25, 0.5), 0.14, ink)
    artist.shape(kinds[1], (0.75, 0.5), 0.14, other_ink)
    truth = rng.random() < 0.5
    told = kinds[rng.randrange(2)] if truth else kinds[2]
    text = rng.choice(
        (
            f"Is there a {told} in this image?",
            f"Does the picture contain a {told}? Answer yes or no.",
            f"Can you see a {told} here? yes or no",
        )
    )
    if rng.random() < 0.35:
        first = kinds[0] if truth else kinds[1]
        second = kinds[1] if truth else kinds[0]
        text = f"Is the {first} to the left of the {second}? Answer yes or no."
    elif rng.random() < 0.4:
        clash = {"red": "blue", "blue": "yellow"}.get(name, "red")
        clash = "green" if clash == name else clash
        text = f"Is the {kinds[0]} {name if truth else clash}?"
    return one("yes/no", text, "yes" if truth else "no", artist)


def read_case(rng: random.Random, fonts: list[str]) -> Case:
    artist, word = OtherArtist(rng, fonts), rng.choice(WORDS)
    if rng.random() < 0.35:
        letters = "ABCDEFGHKLMNPRSTUVXYZ23456789"
        word = "".join(rng.choice(letters) for _ in range(rng.randint(3, 8)))
    height = math.exp(rng.uniform(math.log(18), math.log(110)))
    spot = rng.choice(((0.5, 0.5), (0.5, 0.25), (0.5, 0.75), (0.3, 0.5)))
    dark = sum(sum(c) for c in artist.back) / len(artist.back) < 380
    ink = rgb(
        rng.choice(
            ("white", "yellow", "#ffcc00", "white")
            if dark
            else ("black", "black", "navy", "darkred", "darkgreen", "#333333")
        )
    )
    artist.text(word, spot, height, ink)
    text = rng.choice((
        "What does the picture say?", "Read the word in the image. Reply with only the text.", "What is written in this picture?",
        "What text is in the image? Answer with the exact text only.", "Please read the text in this picture.", "Which word do you see?",
        "What word or number is shown? Reply with just it.",
    ))  # fmt: skip
    return one("read", text, word, artist)


def several_case(rng: random.Random, fonts: list[str]) -> Case:
    first, second = OtherArtist(rng, fonts), OtherArtist(rng, fonts)
    kinds = rng.sample(SHAPES, 2)
    names = [first.color(), second.color()]
    first.shape(kinds[0], (0.5, 0.5), 0.25, names[0][1])
    second.shape(kinds[1], (0.5, 0.5), 0.25, names[1][1])
    index = rng.randrange(2)
    nth = ("first", "second")[index]
    text, answer = rng.choice(
        (
            (
                f"Which picture shows a {kinds[index]}? Answer the first or the second.",
                f"the {nth}",
            ),
            (
                f"Which image contains the {kinds[index]}, the first or the second one?",
                f"the {nth}",
            ),
            (f"What color is the shape in the {nth} picture?", names[index][0]),
            (f"What shape is in the {nth} image? One word.", kinds[index]),
        )
    )
    return Case(None, [Step([first.picture(), second.picture(), text], (answer,), "several")])


def follow_case(rng: random.Random, fonts: list[str]) -> Case:
    artist, kind = OtherArtist(rng, fonts), rng.choice(SHAPES)
    name, ink = artist.color()
    place = rng.choice(list(SPOTS))
    artist.shape(kind, SPOTS[place], rng.uniform(0.09, 0.16), ink)
    steps = [Step([artist.picture(), "What shape is in the picture?"], (kind,), "shape")]
    steps.append(
        Step(
            [rng.choice(("And what color is it?", "What colour is it?", "And its color?"))],
            (name,),
            "follow-up",
        )
    )
    steps.append(
        Step(
            [rng.choice(("Where is it?", "And where is it?", "Where is it in the picture?"))],
            (place,),
            "follow-up",
        )
    )
    return Case(rng.choice((None, "You are a helpful assistant.")), steps)


MAKERS: tuple[Maker, ...] = (
    shape_case, color_case, count_case, where_case, yes_case, read_case, several_case, follow_case,
)  # fmt: skip


def other_cases(fonts: list[str], per_category: int, seed: int = 77) -> Iterator[Case]:
    rng = random.Random(seed)
    for _ in range(per_category):
        for maker in MAKERS:
            yield maker(rng, fonts)
