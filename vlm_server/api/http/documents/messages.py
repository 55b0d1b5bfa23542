"""The messages between the front and a process that draws pages.

A process gets a job with the whole file, draws for some seconds, and ends: a long document is many
jobs, between which those of other requests have their turn.
"""

from __future__ import annotations

from msgspec import Struct, msgpack

from vlm_server.api.parsing.media.documents import Document, PageImage


class PageSize(Struct, frozen=True):
    """The size of drawn pages: at `dpi`, or smaller, so that none has more than `max_pixels`."""

    dpi: float
    max_pixels: int


class DrawJob(Struct, frozen=True):
    """The pages of a document to draw: those wanted without `skipped`, which the front has."""

    document: Document
    size: PageSize
    skipped: tuple[int, ...]
    max_pages: int
    max_source_pixels: int
    """The most pixels of a TIFF's page before it is scaled down."""


class Drawn(Struct, frozen=True, tag=True):
    """The pages that were drawn, at least one of those wanted and not skipped, if there was any.

    `seconds` is the time that it took.
    """

    num_pages: int
    images: tuple[PageImage, ...]
    seconds: float


encode = msgpack.Encoder().encode
decode_job = msgpack.Decoder(DrawJob).decode
