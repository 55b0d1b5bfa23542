"""Fonts to draw words with, and the words. Knows Pillow's fonts; knows no scenes."""

from __future__ import annotations

import functools
import io
import random
import string
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFont

Mask = NDArray[np.uint8]

# Families never trained on, for evaluation.
HELD_OUT = (
    "b612", "cabin", "clear-sans", "manrope", "courier-prime", "quattrocento", "oldstandard",
    "andika", "anonymous-pro",
)  # fmt: skip
UNFIT = ("symbol", "d050000l", "z003", "chorus", "bebas", "humor", "emoji", "ornament", "math")
COMMON = ("dejavu", "liberation", "roboto", "open-sans", "opensans", "notosans-", "lato", "carlito")
DEFAULT_FONT = ""
# A word made of these alone looks the same in both cases.
CASELESS = set("cosuvwxzCOSUVWXZ")
PLAIN = "ABCDEFGHJKLMNPQRSTUVWXYZ"


@functools.lru_cache(maxsize=6000)
def load_font(path: str, size: int) -> ImageFont.FreeTypeFont:
    if path == DEFAULT_FONT:
        font = ImageFont.load_default(size)
        assert isinstance(font, ImageFont.FreeTypeFont)
        return font
    # From memory: a cached font would else hold its file open.
    return ImageFont.truetype(
        io.BytesIO(_font_bytes(path)), size, layout_engine=ImageFont.Layout.BASIC
    )


@functools.cache
def _font_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


def usable(path: str) -> bool:
    """Has ASCII glyphs, and small letters that differ from capitals."""
    try:
        font = load_font(path, 24)
        masks = {c: bytes(font.getmask(c)) for c in "aAgGbBdDeErR17$:%.QqZzMm"}
    except OSError:
        return False
    blank = [c for c, m in masks.items() if not any(m)]
    return not blank and masks["a"] != masks["A"] and len(set(masks.values())) > 20


def find_fonts(root: Path, held_out: bool) -> list[str]:
    """Usable font files under `root`; the held-out families, or all others plus the default."""
    paths = []
    for path in sorted(root.rglob("*.[to]tf")):
        name = str(path.relative_to(root)).lower()
        if any(word in name for word in UNFIT):
            continue
        if any(word in name for word in HELD_OUT) == held_out and usable(str(path)):
            paths.append(str(path))
    return paths if held_out else [*paths, DEFAULT_FONT]


class FontBook:
    """Picks fonts: well-known families more often than the rest."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.common = [p for p in paths if any(w in p.lower() for w in COMMON)] or paths
        if DEFAULT_FONT in paths:
            self.common += [DEFAULT_FONT] * 4

    def pick(self, rng: random.Random) -> str:
        return rng.choice(self.common if rng.random() < 0.45 else self.paths)


def text_mask(path: str, size: int, text: str, *, smooth: bool, stroke: int = 0) -> Mask:
    """(height, width) coverage of the text, cropped to its ink."""
    font = load_font(path, size)
    core = font.getmask(text, mode="L" if smooth else "1", stroke_width=stroke)
    width, height = core.size
    if not width or not height:
        return np.zeros((1, 1), np.uint8)
    image = Image.new("L", (width, height))
    image.im.paste(core, (0, 0, width, height))
    mask = np.asarray(image)
    if not smooth:
        mask = np.where(mask > 0, 255, 0).astype(np.uint8)
    rows = np.flatnonzero(mask.max(axis=1))
    cols = np.flatnonzero(mask.max(axis=0))
    if not len(rows):
        return np.zeros((1, 1), np.uint8)
    return np.ascontiguousarray(mask[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1])


class Words:
    """Words, numbers and random strings of at most eight characters."""

    def __init__(self, path: Path | None) -> None:
        listed = path.read_text().split() if path else COMMON_WORDS
        self.words = [
            w.lower()
            for w in listed
            if w.isascii() and w.isalpha() and 2 <= len(w) <= 8 and w[1:].islower()
        ]
        self.common = COMMON_WORDS

    def pick(self, rng: random.Random, longest: int = 8) -> str:
        for _ in range(50):
            text = self._candidate(rng)
            letters = [c for c in text if c.isalpha()]
            ambiguous = bool(letters) and all(c in CASELESS for c in letters)
            if len(text) <= longest and not ambiguous:
                return text
        return "HELLO"[:longest]

    def _candidate(self, rng: random.Random) -> str:
        kind = rng.random()
        if kind < 0.20:
            return _cased(rng, rng.choice(self.common))
        if kind < 0.54:
            return _cased(rng, rng.choice(self.words))
        if kind < 0.74:
            return _number(rng)
        return _random_string(rng)


def _cased(rng: random.Random, word: str) -> str:
    kind = rng.random()
    if kind < 0.42:
        return word.upper()
    return word.capitalize() if kind < 0.74 else word


def _number(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.55:
        count = rng.choice((1, 2, 2, 3, 3, 4, 4, 4, 5, 6, 7, 8))
        return "".join(rng.choice(string.digits) for _ in range(count))
    if kind < 0.72:
        point = "." if rng.random() < 0.9 else ","
        return f"{rng.randint(0, 10 ** rng.randint(1, 4))}{point}{rng.randint(0, 99):02d}"
    if kind < 0.80:
        return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02d}"
    if kind < 0.86:
        return f"{rng.randint(0, 100)}%"
    if kind < 0.92:
        return f"${rng.randint(1, 999)}"
    if kind < 0.96:
        return f"{rng.randint(1, 99)}.{rng.randint(0, 9)}"
    return f"-{rng.randint(1, 99)}"


def _random_string(rng: random.Random) -> str:
    length = rng.choice((1, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 8, 8))
    kind = rng.random()
    if kind < 0.36:
        alphabet = string.ascii_uppercase
    elif kind < 0.56:
        alphabet = string.ascii_lowercase
    elif kind < 0.78:
        alphabet = PLAIN + "23456789" * 2
    elif kind < 0.90:
        return "".join(rng.choice(string.ascii_lowercase) for _ in range(length)).capitalize()
    elif kind < 0.95:
        front = "".join(rng.choice(PLAIN) for _ in range(rng.randint(1, 3)))
        return f"{front}-{rng.randint(1, 999)}"
    else:
        alphabet = "ABDEFGHKLMNPQRTY" + "abdefghkmnqrty" + "2345679"
    return "".join(rng.choice(alphabet) for _ in range(length))


COMMON_WORDS = """
hello world invoice total error cancel save open close exit start stop login logout submit
search menu file edit view help next back home user email name date time price order cart pay
cash card sale free new sold shop store hotel taxi bus train plane north south east west left
right up down yes no ok on off in out go push pull play pause music video photo image camera
phone tablet mac apple banana lemon mango grape peach cherry bread butter milk water coffee tea
sugar salt pepper red green blue yellow orange purple black white pink brown circle square star
triangle one two three four five six seven eight nine ten monday tuesday friday sunday january
march april may june july august october python swift rust java code data model server client
token cache test demo alpha beta gamma delta omega warning danger caution private public hotdog
pizza burger salad soup street road park school bank museum library office garden river lake
ocean mountain forest summer winter spring autumn rain snow wind cloud sun moon cat dog bird
fish horse tiger lion bear mouse
""".split()  # noqa: SIM905 - a list of strings would be four times as long
