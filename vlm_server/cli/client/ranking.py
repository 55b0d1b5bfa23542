"""Test queries for models that make vectors or scores, and the documents that they put first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vlm_server.cli.client.daemon import Daemon
from vlm_server.cli.client.questions import image_questions

_TEXTS = {
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
        documents = list(_TEXTS.values())
        queries = [(query, query) for query in _TEXTS]
    for (shown, query), expected in zip(queries, documents, strict=True):
        body = {"model": "default", "query": query, "documents": documents, "top_n": 1}
        (best,) = daemon.post("rerank", body)["results"]
        yield Ranking(shown, expected, documents[best["index"]], best["relevance_score"])
