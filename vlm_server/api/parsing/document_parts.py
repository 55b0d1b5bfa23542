"""A document as parts of a message: for each page its number, its image and its text."""

from __future__ import annotations

from collections.abc import Iterator

from vlm_server.api.parsing.media.documents import PageImage, Pages
from vlm_server.protocol import ImagePart, TextPart


def heading(title: str, context: str) -> str:
    """The text before a document's pages: its title, and what the client says of it."""
    lines = [f"Document: {title}"] if title else []
    return "\n".join([*lines, *([context] if context else [])])


def page_parts(
    pages: Pages, page: PageImage, index: int, *, include_text: bool
) -> Iterator[TextPart | ImagePart]:
    """The parts of one page, whose image has that `index` in the request.

    They depend on the page alone: a changed page, or one more, leaves those before it as they are.
    A document of a single page has no line with its number.
    """
    if pages.num_pages > 1:
        yield TextPart(f"\nPage {page.number}:\n")
    yield ImagePart(index)
    if include_text:
        text = page.text.strip() or "(none)"
        yield TextPart(f"\nText of page {page.number}:\n{text}\n")
