"""The drawing of documents' pages, in processes started on demand, and kept for later requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from vlm_server.api.fair_turns import FairPool, FairTurns
from vlm_server.api.http.documents import messages, page_ranges
from vlm_server.api.http.documents.messages import DrawJob, Drawn, PageSize
from vlm_server.api.http.documents.page_cache import PageCache
from vlm_server.api.parsing.media.documents import Detail, Document, PageImage, Pages
from vlm_server.errors import (
    InvalidDocument,
    PayloadTooLarge,
    RequestError,
    RequestTooCostly,
)
from vlm_server.platform.child.pool import ChildFailed, ChildTimeout
from vlm_server.settings import Settings

_CHILD = "vlm_server.api.http.documents.process"
_QUICK_SECONDS = 8.0
"""Time for the first attempt at a job, which is made to take about two seconds."""
_SCALES: dict[Detail, float] = {"auto": 1.0, "low": 0.5, "high": 2.0}

Reserve = Callable[[int], None]
"""Reserves room for so many bytes in all, or raises."""

logger = logging.getLogger(__name__)


class DrawnCounts(msgspec.Struct):
    """Documents and pages of all requests, and the seconds that drawing took."""

    documents: int = 0
    pages: int = 0
    cached_pages: int = 0
    seconds: float = 0.0


class Documents:
    """Draws the pages of requests' documents within the limits. Use from one event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings.document
        self._limits = settings.limits
        self.cache = PageCache(settings.document.max_cache_bytes)
        self.counts = DrawnCounts()
        size = self._settings.max_processes
        spared = max(1, size - 1)
        self._slow_turns = FairTurns(spared)
        self._pool = FairPool(
            _CHILD,
            size,
            self._settings.draw_timeout_seconds,
            outcome=Drawn,
            memory_bytes=self._settings.max_draw_memory_bytes,
            owner_limit=spared if settings.server.needs_key else size,
        )

    async def draw(
        self, documents: Sequence[Document], owner: str, salt: str, reserve: Reserve
    ) -> dict[str, Pages]:
        """The pages of each document of `owner`, by its key. Cancelling kills the process.

        `reserve` is told the bytes that are held so far. Raises what it raises, and RequestError,
        also for more pages, or larger ones, than a request may have.
        """
        drawn: dict[str, Pages] = {}
        num_file_bytes = sum(len(document.data) for document in documents)
        request = _Request(
            owner, salt, lambda held: reserve(num_file_bytes + held), self._limits.max_pages
        )
        request.reserve(0)
        for document in documents:
            work = _Work(document, self._size(document), request)
            pages = drawn[document.key] = await self._draw(work)
            request.num_pages_left -= len(pages.images)
            request.num_bytes += pages.num_bytes
            self.counts.documents += 1
            self.counts.pages += len(pages.images)
        return drawn

    def _size(self, document: Document) -> PageSize:
        options, settings = document.options, self._settings
        dpi = options.dpi or settings.dpi * _SCALES[options.detail]
        max_pixels = options.max_pixels or settings.max_pixels
        return PageSize(dpi, min(max_pixels, self._limits.max_image_pixels))

    async def _draw(self, work: _Work) -> Pages:
        """All pages of one document."""
        document, cache, salt = work.document, self.cache, work.request.salt
        num_pages = cache.num_pages(document, salt)
        if num_pages is not None:
            for number in self._select(work, num_pages):
                page = cache.page(document, number, work.size, salt)
                if page is not None:
                    work.images[number] = page
            self._check_size(work)
        self.counts.cached_pages += len(work.images)
        while num_pages is None or len(work.images) < len(self._select(work, num_pages)):
            drawn = await self._run(work)
            num_pages = drawn.num_pages
            self._keep(work, drawn)
            self._check_size(work)
        images = tuple(work.images[number] for number in sorted(work.images))
        return Pages(num_pages, images)

    def _select(self, work: _Work, num_pages: int) -> list[int]:
        try:
            options = work.document.options
            return page_ranges.select(options.pages, num_pages, work.request.num_pages_left)
        except page_ranges.PagesError as error:
            raise InvalidDocument(str(error), work.document.param) from None

    def _keep(self, work: _Work, drawn: Drawn) -> None:
        salt = work.request.salt
        work.request.seconds += drawn.seconds
        self.counts.seconds += drawn.seconds
        self.cache.put_num_pages(work.document, drawn.num_pages, salt)
        for image in drawn.images:
            work.images[image.number] = image
            self.cache.put_page(work.document, image, work.size, salt)

    def _check_size(self, work: _Work) -> None:
        limit = self._limits.max_body_bytes
        num_bytes = work.request.num_bytes + sum(
            len(image.png) + len(image.text) for image in work.images.values()
        )
        work.request.reserve(num_bytes)
        if num_bytes > limit:
            raise PayloadTooLarge(
                f"The pages of the documents take more than {limit} bytes as pictures "
                f"(limits.max_body_bytes), of which {len(work.images)} of this document are drawn. "
                "Ask about fewer, with `pages`, or smaller ones, with `max_pixels`.",
                work.document.param,
            )

    async def _run(self, work: _Work) -> Drawn:
        """The outcome of one job. Raises RequestError.

        A job that takes long, or breaks its process, is tried once more in a slow turn, so that
        there is always a process for other documents.
        """
        seconds = min(_QUICK_SECONDS, self._seconds_left(work))
        if seconds <= 0:
            raise self._too_slow(work)
        job = messages.encode(
            DrawJob(
                work.document,
                work.size,
                tuple(work.images),
                work.request.num_pages_left,
                self._limits.max_image_pixels,
            )
        )
        owner = work.request.owner
        try:
            return await self._pool.run(job, owner, seconds)
        except (ChildTimeout, ChildFailed) as error:
            work.request.seconds += seconds
            seconds = self._seconds_left(work)
            if seconds <= 0:
                raise self._failure(work, error) from None
        async with self._slow_turns.turn(owner):
            try:
                return await self._pool.run(job, owner, seconds)
            except (ChildTimeout, ChildFailed) as error:
                raise self._failure(work, error) from None

    def _seconds_left(self, work: _Work) -> float:
        return self._settings.draw_timeout_seconds - work.request.seconds

    def _failure(self, work: _Work, error: ChildTimeout | ChildFailed) -> RequestError:
        if isinstance(error, ChildTimeout):
            return self._too_slow(work)
        logger.warning("drawing pages failed: the process %s", error)
        return InvalidDocument(
            f"The document can't be read: after {len(work.images)} pages, it takes too much memory "
            "(document.max_draw_memory_bytes), or is made to break readers.",
            work.document.param,
        )

    def _too_slow(self, work: _Work) -> RequestTooCostly:
        return RequestTooCostly(
            f"Drawing the documents took more than {self._settings.draw_timeout_seconds:g} seconds "
            f"(document.draw_timeout_seconds); {len(work.images)} pages of this one were drawn. "
            "Ask about fewer, with `pages`, or smaller ones, with `dpi` or `max_pixels`.",
            work.document.param,
        )


@dataclass(slots=True)
class _Request:
    """What is left to a request, and what it holds; `reserve` is told of that."""

    owner: str
    salt: str
    reserve: Reserve
    num_pages_left: int
    num_bytes: int = 0
    """Bytes of the pages of its documents so far."""
    seconds: float = 0.0
    """Time that drawing them took."""


@dataclass(slots=True)
class _Work:
    """A document, and its pages so far, by number."""

    document: Document
    size: PageSize
    request: _Request
    images: dict[int, PageImage] = field(default_factory=dict)
