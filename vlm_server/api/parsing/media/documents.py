"""Documents of a request, whose pages the engine gets as images.

Request parsing draws no page: it raises PagesNeeded. The front then has the pages drawn, in a
process that can be killed (`api.http.documents`), and the request is parsed again with them. A
drawn page is a PNG, and its SHA-256 that of what it shows: the same page in another version of a
document is the same image to every cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from vlm_server.api.parsing.media.external import MediaUrl
from vlm_server.api.parsing.media.formats import unreadable_message
from vlm_server.protocol import DocumentPage, Image, ImagePart, TextPart

Detail = Literal["auto", "low", "high"]
_READABLE = ("PDF", "TIFF")
_TIFF_STARTS = (b"II*\0", b"MM\0*")
_HEADER_BYTES = 1024
"""The bytes in which the mark of a PDF may begin, as in Acrobat and PDFium."""


class PageOptions(Struct, frozen=True):
    """The pages of a document that are wanted, such as `1-3,7` (empty is all), and their size.

    dpi, max_pixels: None is the server's setting. `detail` low halves its dpi, and high doubles it.
    include_text: whether the text of each page follows its image.
    """

    pages: str = ""
    dpi: float | None = None
    max_pixels: int | None = None
    detail: Detail = "auto"
    include_text: bool = False


class Document(Struct, frozen=True):
    """A document's file, with what its header says; `digest` is the SHA-256 of `data` in hex.

    `param` names the content part that it came from.
    """

    data: bytes
    digest: str
    format: Literal["PDF", "TIFF"]
    param: str
    options: PageOptions

    @property
    def key(self) -> str:
        """The name of its pages in `Context.pages`: the same file with the same options."""
        return f"{self.digest} {self.options!r}"


class PageImage(Struct, frozen=True):
    """A drawn page: its number, from 1, and a PNG. `text` is that of its text layer, if wanted."""

    number: int
    png: bytes
    width: int
    height: int
    text: str = ""

    def to_image(self, document: int, num_pages: int, param: str) -> Image:
        """The image of the engine's request: of the document number `document` of the request."""
        return Image(
            data=self.png,
            content_hash=hashlib.sha256(self.png).hexdigest(),
            format="PNG",
            width=self.width,
            height=self.height,
            param=param,
            page=DocumentPage(document, self.number, num_pages),
        )


class Pages(Struct, frozen=True):
    """The drawn pages of a document of `num_pages`, in their order."""

    num_pages: int
    images: tuple[PageImage, ...]

    @property
    def num_bytes(self) -> int:
        return sum(len(image.png) + len(image.text) for image in self.images)


class PagesNeeded(Exception):
    """Pages of `documents` are needed to parse a request. Not an error of the client."""

    def __init__(self, documents: Sequence[Document]) -> None:
        super().__init__(f"{len(documents)} documents")
        self.documents = tuple(documents)


DrawnPages = Mapping[str, Pages]
"""The pages of the request's documents that were drawn so far, by `Document.key`."""


def is_pdf(data: bytes) -> bool:
    """Whether `data` begins like a PDF."""
    return b"%PDF-" in data[:_HEADER_BYTES]


def read_header(data: bytes, source: MediaUrl, options: PageOptions) -> Document:
    """The document in `data`, which came from `source`. Raises InvalidDocument."""
    if is_pdf(data):
        kind: Literal["PDF", "TIFF"] = "PDF"
    elif data.startswith(_TIFF_STARTS):
        kind = "TIFF"
    else:
        raise source.invalid(unreadable_message("document", _READABLE, data))
    return Document(data, hashlib.sha256(data).hexdigest(), kind, source.param, options)


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
