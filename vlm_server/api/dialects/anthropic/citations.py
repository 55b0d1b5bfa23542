"""Citations of pages: the model is asked to name pages in brackets, and the client gets citations.

The model names a page, and quotes nothing: so `cited_text` is empty. A mark that names a page which
was not shown stays text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import Struct

_MARK = re.compile(
    r"\[(?:document ([0-9]{1,4}), )?pages? ([0-9]{1,6})(?: ?- ?([0-9]{1,6}))?\]", re.IGNORECASE
)
_BEGINNING = re.compile(r"\[[A-Za-z0-9 ,-]{0,40}")
"""Text that may become a mark."""


class CitedDocument(Struct, frozen=True):
    """A document whose pages may be cited; `index` counts the request's documents from 0."""

    index: int
    title: str | None
    pages: tuple[int, ...]


class Segment(NamedTuple):
    """A piece of the answer's text, and the citation that follows it, if any."""

    text: str
    citation: dict[str, Any] | None = None


def instruction(index: int) -> str:
    """What the model reads after the pages of document `index`. The first one needs no number."""
    mark = f"[document {index + 1}, page 3]" if index else "[page 3]"
    return (
        "\nAfter each statement that is taken from this document, name its page in brackets, such "
        f"as {mark}.\n"
    )


class CitationParser:
    """Splits an answer's text, given piece by piece, at the marks of pages."""

    def __init__(self, documents: Sequence[CitedDocument]) -> None:
        self._documents = {document.index: document for document in documents}
        self._held = ""
        """The end of the text so far, if it may be the beginning of a mark."""

    def feed(self, text: str) -> list[Segment]:
        """The segments that end with `text`."""
        if not self._documents:
            return [Segment(text)]
        text = self._held + text
        start = text.rfind("[")
        may_begin = start >= 0 and _BEGINNING.fullmatch(text, start)
        self._held = text[start:] if may_begin else ""
        return self._split(text.removesuffix(self._held))

    def flush(self) -> list[Segment]:
        """What is left at the end of the text."""
        held, self._held = self._held, ""
        return [Segment(held)] if held else []

    def _split(self, text: str) -> list[Segment]:
        segments, start = [], 0
        for match in _MARK.finditer(text):
            citation = self._citation(match)
            if citation is not None:
                segments.append(Segment(text[start : match.start()], citation))
                start = match.end()
        return [*segments, Segment(text[start:])] if text[start:] else segments

    def _citation(self, match: re.Match[str]) -> dict[str, Any] | None:
        """The JSON of a citation; None if the pages were not shown."""
        document = self._documents.get(int(match[1] or 1) - 1)
        first, last = int(match[2]), int(match[3] or match[2])
        if document is None or first > last or not {first, last} <= set(document.pages):
            return None
        return {
            "type": "page_location",
            "cited_text": "",
            "document_index": document.index,
            "document_title": document.title,
            "start_page_number": first,
            "end_page_number": last + 1,
        }
