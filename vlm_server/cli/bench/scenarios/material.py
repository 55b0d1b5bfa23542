"""The images and messages that servers are asked about, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

from vlm_server.cli.bench.scenarios.images import data_url, random_png

T = TypeVar("T")

Message = dict[str, Any]
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


class Material:
    """The images and words of one scenario in one round.

    The same (seed, round, scenario) gives the same sequence, so that every server gets the same
    requests. Every round has its own, so that nothing is cached from an earlier one.
    """

    def __init__(self, size: tuple[int, int], seed: int, scenario: str, round_: int) -> None:
        self._size = size
        self._rng = random.Random(f"{seed}/{scenario}/{round_}")  # noqa: S311

    def image(self) -> str:
        """The data URL of a new image."""
        return data_url(random_png(self._size, self._rng))

    def story(self) -> list[Message]:
        """A text request that invites a long answer, new in its first words."""
        words = f"{self._rng.choice(_NOUNS)} and {self._rng.randrange(10**6)} {self._end()}"
        return [user(f"{words}: write a long story about that.")]

    def system(self) -> Message:
        """A system prompt of 20 short sentences."""
        sentences = (
            f"{self._rng.choice(_VERBS).capitalize()} the {self._rng.choice(_NOUNS)} {self._end()}."
            for _ in range(20)
        )
        return {"role": "system", "content": " ".join(sentences)}

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return self._rng.sample(items, len(items))

    def seconds(self, least: float, most: float) -> float:
        """How long a user waits."""
        return self._rng.uniform(least, most)

    def _end(self) -> str:
        return self._rng.choice(_ENDS)


def user(text: str, *urls: str) -> Message:
    """A user's message: the images at `urls`, then `text`."""
    if not urls:
        return {"role": "user", "content": text}
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
