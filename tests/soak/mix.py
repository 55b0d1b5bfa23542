"""What users ask, drawn from a seed."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from tests.soak.malformed import malformed
from tests.soak.request import Kind, Patience, Request
from tests.soak.videos import random_gif, video_part
from vlm_server.cli.bench.material import (
    DESCRIBE,
    QUESTIONS,
    ChatMessage,
    assistant,
    data_url,
    random_png,
    user,
)

WEIGHTS = {
    Kind.NEW_IMAGE: 14,
    Kind.SAME_AGAIN: 18,
    Kind.OTHER_QUESTION: 14,
    Kind.TWO_IMAGES: 5,
    Kind.CONVERSATION: 14,
    Kind.SHORT_TEXT: 16,
    Kind.LONG_TEXT: 5,
    Kind.VIDEO: 2,
    Kind.CHOICES: 3,
    Kind.JSON: 2,
    Kind.MALFORMED: 7,
}
"""Relative frequency of each kind."""

LEAVERS = 0.12
"""Share of requests whose client disconnects early."""
STREAMS = 0.7
_SIDES = (64, 128, 224, 224, 320, 448)
_GALLERY = 8
_CLIPS = 4
_TURNS = 6
_LONG_WORDS = (150, 1200)
_WORDS = ("red", "circle", "blue", "square", "left", "of", "the", "star", "and", "two", "what")
_SCHEMAS = 400
_GRAMMARS = 64
"""How many the engine caches."""
_REFILLS = 20
_REFILL_SIZE = (416, 416)
_REFILL_WORDS = 80


class Gallery:
    """Images and videos that all users share."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"{seed}/gallery")
        self.images = [random_image(rng) for _ in range(_GALLERY)]
        self.clips = [random_gif(rng) for _ in range(_CLIPS)]


class User:
    """Asks one request after another, determined by (seed, number).

    Only the history of a conversation depends on the answers.
    """

    def __init__(self, gallery: Gallery, seed: int, number: int) -> None:
        self.number = number
        self._gallery = gallery
        self._rng = random.Random(f"{seed}/user {number}")
        self._history: list[ChatMessage] = []
        self._turn: ChatMessage = {}

    def next(self) -> Request:
        """Draw the next request."""
        kind = self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if kind is Kind.MALFORMED:
            return self._rng.choice(malformed(random_image(self._rng)))
        fields = self._sampling() | self._fields(kind)
        patience = Patience()
        if self._rng.random() < LEAVERS:
            patience, changes = self._leaving(kind)
            fields |= changes
        body = msgspec.json.encode({"model": "default"} | fields)
        return Request(kind, body, fields["stream"], patience)

    def hear(self, request: Request, text: str) -> None:
        """Continue a conversation whose last turn was answered with `text`."""
        if request.kind is Kind.CONVERSATION:
            self._history += [self._turn, assistant(text)]

    def _sampling(self) -> dict[str, Any]:
        is_greedy = self._rng.random() < 0.7
        return {
            "max_tokens": self._rng.choice((8, 16, 32)),
            "temperature": 0 if is_greedy else 0.8,
            "seed": self._rng.randrange(2**31),
            "stream": self._rng.random() < STREAMS,
        }

    def _fields(self, kind: Kind) -> dict[str, Any]:
        """The messages and other fields of a request of `kind`."""
        rng = self._rng
        match kind:
            case Kind.NEW_IMAGE:
                return _ask(DESCRIBE, random_image(rng))
            case Kind.SAME_AGAIN:
                return _ask(DESCRIBE, self._known())
            case Kind.OTHER_QUESTION:
                return _ask(f"{rng.choice(QUESTIONS)} {rng.randrange(10**6)}", self._known())
            case Kind.TWO_IMAGES:
                return _ask("Which picture has a star?", self._known(), random_image(rng))
            case Kind.CONVERSATION:
                return {"messages": self._conversation()}
            case Kind.SHORT_TEXT:
                return _ask(f"Count from {rng.randrange(50)} to 100.")
            case Kind.LONG_TEXT:
                return _ask(_words(rng, rng.randint(*_LONG_WORDS)))
            case Kind.VIDEO:
                clip = rng.choice((random_gif(rng), *self._gallery.clips))
                text = {"type": "text", "text": "Which way does it move?"}
                return {"messages": [{"role": "user", "content": [video_part(clip), text]}]}
            case Kind.CHOICES:
                return _ask(DESCRIBE, self._known()) | {"n": 2}
            case _:
                assert kind is Kind.JSON, kind
                return (
                    _ask(DESCRIBE, self._known())
                    | _schema(rng.randrange(_SCHEMAS))
                    | {"max_tokens": 48}
                )

    def _conversation(self) -> list[ChatMessage]:
        """All turns so far and the next one, which sometimes has a new image."""
        if len(self._history) >= 2 * _TURNS:
            self._history = []
        images = []
        if not self._history or self._rng.random() < 0.3:
            images.append(data_url(random_image(self._rng)))
        self._turn = user(self._rng.choice(QUESTIONS), *images)
        return [*self._history, self._turn]

    def _known(self) -> bytes:
        return self._rng.choice(self._gallery.images)

    def _leaving(self, kind: Kind) -> tuple[Patience, dict[str, Any]]:
        """When to disconnect, and the fields that make the answer last until then."""
        match self._rng.randrange(3):
            case 0:
                return Patience(upload_share=self._rng.random()), {}
            case 1:
                return Patience(seconds=self._rng.uniform(0.0, 0.5)), {}
            case _:
                long = {"max_tokens": 200, "ignore_eos": kind is not Kind.JSON}
                return Patience(reads=self._rng.randint(1, 30)), {"stream": True} | long


def refills(seed: int) -> list[Request]:
    """The same for one seed: enough to replace everything in the caches of the soak's daemon."""
    rng = random.Random(f"{seed}/refills")
    bodies = (
        {"model": "default", "max_tokens": 1, "temperature": 0}
        | _ask(_words(rng, _REFILL_WORDS), random_png(_REFILL_SIZE, rng))
        for _ in range(_REFILLS)
    )
    return [_refill(body) for body in bodies]


def schemas() -> list[Request]:
    """More schemas than the engine keeps grammars: each later one evicts an old one."""
    asked = {"model": "default", "max_tokens": 1} | _ask("Hello")
    return [_refill(asked | _schema(number)) for number in range(_GRAMMARS)]


def _refill(body: dict[str, Any]) -> Request:
    return Request(Kind.REFILL, msgspec.json.encode(body))


def random_image(rng: random.Random) -> bytes:
    return random_png((rng.choice(_SIDES), rng.choice(_SIDES)), rng)


def _ask(text: str, *images: bytes) -> dict[str, Any]:
    return {"messages": [user(text, *map(data_url, images))]}


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(_WORDS, k=count))


def _schema(number: int) -> dict[str, Any]:
    """A schema; answers to all of them have the same form."""
    properties = {
        "colour": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "maximum": 6},
    }
    schema = {
        "title": f"picture {number}",
        "type": "object",
        "properties": properties,
        "required": list(properties),
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "picture", "schema": schema}}
    return {"response_format": wanted}
