"""Images and messages of the requests, random by a seed; no server has the images cached."""

from __future__ import annotations

import base64
import io
import random
import re
from collections.abc import Sequence
from typing import Any, TypeVar

from PIL import Image

from vlm_server.errors import ConfigError

BLOCK_PIXELS = 20
_MAX_SIDE_PIXELS = 8192


T = TypeVar("T")
ChatMessage = dict[str, Any]
"""One message of a chat request, as JSON."""
DESCRIBE = "Describe this image in one sentence."
QUESTIONS = (
    "Which colours are there?",
    "What is in the upper left corner?",
    "Is the picture bright or dark?",
    "How many parts does the picture have?",
    "What stands out most?",
    "Which colour is the most frequent?",
    "What is at the bottom?",
    "Does anything repeat itself?",
)
_VERBS = ("check", "watch", "name", "open", "read", "find", "close", "count", "keep", "move")
_NOUNS = ("windows", "buttons", "menus", "files", "pages", "icons", "fields", "lists", "tabs")
_ENDS = ("first", "with care", "one by one", "before you act", "at every step", "only once")


def parse_size(text: str) -> tuple[int, int]:
    """`560x420` as (width, height) in pixels. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]{1,5})[x×]([0-9]{1,5})", text.strip().lower())  # noqa: RUF001
    size = (int(match[1]), int(match[2])) if match else (0, 0)
    if not all(BLOCK_PIXELS <= side <= _MAX_SIDE_PIXELS for side in size):
        raise ConfigError(
            f"expected WIDTHxHEIGHT, each from {BLOCK_PIXELS} to {_MAX_SIDE_PIXELS}, not {text!r}"
        )
    return size


def random_png(size: tuple[int, int], rng: random.Random) -> bytes:
    """PNG of `size` (width, height) made of random blocks; determined by `rng`."""
    width, height = size
    columns, rows = -(-width // BLOCK_PIXELS), -(-height // BLOCK_PIXELS)
    blocks = Image.frombytes("RGB", (columns, rows), rng.randbytes(3 * columns * rows))
    large = (columns * BLOCK_PIXELS, rows * BLOCK_PIXELS)
    image = blocks.resize(large, Image.Resampling.NEAREST).crop((0, 0, width, height))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_url(png: bytes) -> str:
    """Data URL of a PNG."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


class Material:
    """The images and words of a scenario: the same for every server, new in every round."""

    def __init__(self, size: tuple[int, int], seed: int, scenario: str, round_: int) -> None:
        self._size = size
        self._rng = random.Random(f"{seed}/{scenario}/{round_}")  # noqa: S311

    def image(self) -> str:
        """The data URL of a new image."""
        return data_url(random_png(self._size, self._rng))

    def story(self) -> list[ChatMessage]:
        """A text request for a long answer, different in its first words."""
        words = f"{self._rng.choice(_NOUNS)} and {self._rng.randrange(10**6)} {self._end()}"
        return [user(f"{words}: write a long story about that.")]

    def system(self) -> ChatMessage:
        """A system prompt of 20 short sentences."""
        sentences = (
            f"{self._rng.choice(_VERBS).capitalize()} the {self._rng.choice(_NOUNS)} {self._end()}."
            for _ in range(20)
        )
        return {"role": "system", "content": " ".join(sentences)}

    def words(self, count: int) -> list[str]:
        """Random words."""
        return self._rng.choices((*_VERBS, *_NOUNS, *" ".join(_ENDS).split()), k=count)

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return self._rng.sample(items, len(items))

    def seconds(self, low: float, high: float) -> float:
        """The pause of a user."""
        return self._rng.uniform(low, high)

    def _end(self) -> str:
        return self._rng.choice(_ENDS)


def user(text: str, *urls: str) -> ChatMessage:
    """A user's message: the images at `urls`, then `text`."""
    if not urls:
        return {"role": "user", "content": text}
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def assistant(text: str) -> ChatMessage:
    return {"role": "assistant", "content": text}
