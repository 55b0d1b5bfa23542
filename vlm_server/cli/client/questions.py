"""Test questions and queries, mostly about drawn images, and the answers of a daemon to them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from vlm_server.cli.client.chat import stream_chunks
from vlm_server.cli.client.daemon import Daemon

_SIDE = 448
_MAX_TOKENS = 64
_RED, _BLUE, _DARK = (214, 39, 40), (31, 80, 200), (20, 20, 20)


@dataclass(frozen=True, slots=True)
class Question:
    """A question: its subject, a word of the right answer, and a PNG as a data URL, if any."""

    subject: str
    text: str
    expected: str
    url: str = ""


def questions_for(daemon: Daemon) -> Iterator[Question]:
    """Test questions for the default model. Raises CommandFailed."""
    return image_questions() if "vision" in daemon.capabilities() else iter(_TEXT_QUESTIONS)


_TEXT_QUESTIONS = (
    Question("The capital of France", "What is the capital of France?", "paris"),
    Question("Two and three", "What is 2 + 3?", "5"),
)


def image_questions() -> Iterator[Question]:
    """A shape, several shapes, a word."""
    image, draw = _canvas()
    draw.ellipse((100, 100, 348, 348), _RED)
    yield Question("A red circle", "What shape is this?", "circle", _url(image))
    image, draw = _canvas()
    for left in (40, 170, 300):
        draw.rectangle((left, 170, left + 108, 278), _BLUE)
    yield Question("Three blue squares", "How many squares are there?", "3", _url(image))
    image, draw = _canvas()
    font = ImageFont.load_default(96)
    draw.text((_SIDE / 2, _SIDE / 2), "HELLO", _DARK, font, anchor="mm")
    yield Question("The word HELLO", "Which word is written here?", "hello", _url(image))


def answer_to(question: Question, daemon: Daemon, seconds: float | None = None) -> str:
    """The answer of the default model. Raises CommandFailed, and TimeoutError after `seconds`."""
    content: list[dict[str, object]] = [{"type": "text", "text": question.text}]
    if question.url:
        content.insert(0, {"type": "image_url", "image_url": {"url": question.url}})
    body = {
        "model": "default",
        "stream": True,
        "max_tokens": _MAX_TOKENS,
        "messages": [{"role": "user", "content": content}],
    }

    async def answer() -> str:
        chunks = stream_chunks(daemon, json.dumps(body).encode())
        return "".join([chunk.content async for chunk in chunks]).strip()

    return asyncio.run(asyncio.wait_for(answer(), seconds))


_ANSWERS_BY_QUERY = {
    "What barks at strangers?": "A dog guards the house.",
    "Where does the sun set?": "In the evening, the west is red.",
    "How is bread made?": "Dough of flour and water is baked.",
}
"""Queries, each with the document that answers it."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """A query in words, the document that suits it, and the one that the model put first."""

    query: str
    expected: str
    first: str
    score: float


def writes(daemon: Daemon) -> bool:
    """Whether the default model answers in words; True if that is unknown."""
    return "completion" in daemon.capabilities()


def rankings(daemon: Daemon) -> Iterator[Ranking]:
    """The default model's rankings for all test queries. Raises CommandFailed."""
    if "vision" in daemon.capabilities():
        pictures = list(image_questions())
        documents = [picture.subject for picture in pictures]
        queries: list[tuple[str, Any]] = [(p.subject, {"image": p.url}) for p in pictures]
    else:
        documents = list(_ANSWERS_BY_QUERY.values())
        queries = [(query, query) for query in _ANSWERS_BY_QUERY]
    for (shown, query), expected in zip(queries, documents, strict=True):
        body = {"model": "default", "query": query, "documents": documents, "top_n": 1}
        (best,) = daemon.post("rerank", body)["results"]
        yield Ranking(shown, expected, documents[best["index"]], best["relevance_score"])


def _canvas() -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (_SIDE, _SIDE), "white")
    return image, ImageDraw.Draw(image)


def _url(image: Image.Image) -> str:
    png = io.BytesIO()
    image.save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
