"""The drawing of documents' pages, in processes started on demand, and kept for later requests."""

from __future__ import annotations

import asyncio
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
from vlm_server.platform import machine
from vlm_server.platform.child.pool import ChildFailed, ChildTimeout
from vlm_server.settings import DocumentSettings, Settings

_CHILD = "vlm_server.api.http.documents.process"
_QUICK_SECONDS = 8.0
"""Time for the first attempt at a job, which is made to take about two seconds."""
_MAX_PROCESSES = 5
"""The most by default: further ones would take memory, and seldom have work."""
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
        self.max_processes = num_processes(self._settings)
        self._spared = max(1, self.max_processes - 1)
        """Processes for one request, for slow turns or, if there are keys, for one key."""
        self._slow_turns = FairTurns(self._spared)
        self._pool = FairPool(
            _CHILD,
            self.max_processes,
            self._settings.draw_timeout_seconds,
            outcome=Drawn,
            memory_bytes=self._settings.max_draw_memory_bytes,
            owner_limit=self._spared if settings.server.needs_key else None,
        )

    async def draw(
        self, documents: Sequence[Document], owner: str, salt: str, reserve: Reserve
    ) -> dict[str, Pages]:
        """The pages of each document of `owner`, by its key. Cancelling kills the processes.

        Several documents are drawn at the same time, so that a process is left for other requests.
        `reserve` is told the bytes that are held so far. Raises what it raises, and RequestError,
        also for more pages, or larger ones, than a request may have.
        """
        max_pages = self._limits.max_pages
        if len(documents) > max_pages:  # each has a page; no tasks for so many
            raise InvalidDocument(
                f"The request has {len(documents)} documents, and at most {max_pages} pages may be "
                "read (limits.max_pages).",
                documents[max_pages].param,
            )
        num_file_bytes = sum(len(document.data) for document in documents)
        request = _Request(owner, salt, lambda held: reserve(num_file_bytes + held))
        request.works += [_Work(each, self._size(each), request) for each in documents]
        request.reserve(0)
        turns = asyncio.Semaphore(self._spared)
        try:
            async with asyncio.TaskGroup() as group:
                drawing = {
                    work.document.key: group.create_task(self._draw(work, turns))
                    for work in request.works
                }
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return {key: task.result() for key, task in drawing.items()}

    def _size(self, document: Document) -> PageSize:
        options, settings = document.options, self._settings
        dpi = options.dpi or settings.dpi * _SCALES[options.detail]
        max_pixels = options.max_pixels or settings.max_pixels
        return PageSize(dpi, min(max_pixels, self._limits.max_image_pixels))

    async def _draw(self, work: _Work, turns: asyncio.Semaphore) -> Pages:
        """All pages of one document."""
        async with turns:
            self._take_cached(work)
            while work.num_pages is None or len(work.images) < len(work.numbers):
                self._keep(work, await self._run(work))
        pages = Pages(work.num_pages, tuple(work.images[number] for number in work.numbers))
        self.counts.documents += 1
        self.counts.pages += len(pages.images)
        return pages

    def _take_cached(self, work: _Work) -> None:
        document, salt = work.document, work.request.salt
        num_pages = self.cache.num_pages(document, salt)
        if num_pages is None:
            return
        self._select(work, num_pages)
        pages = [self.cache.page(document, number, work.size, salt) for number in work.numbers]
        work.images = {page.number: page for page in pages if page is not None}
        self.counts.cached_pages += len(work.images)
        self._check_size(work)

    def _select(self, work: _Work, num_pages: int) -> None:
        """Record the pages wanted of a document; those of the request may be too many by now."""
        work.num_pages = num_pages
        works = work.request.works
        for each in works[works.index(work) :]:
            if each.num_pages is None:
                continue
            try:
                each.numbers = page_ranges.select(
                    each.document.options.pages, each.num_pages, self._num_pages_left(each)
                )
            except page_ranges.PagesError as error:
                raise InvalidDocument(str(error), each.document.param) from None

    def _num_pages_left(self, work: _Work) -> int:
        """The pages that the documents before that of `work` leave to it, as far as is known."""
        works = work.request.works
        num_before = sum(len(each.numbers) for each in works[: works.index(work)])
        return self._limits.max_pages - num_before

    def _keep(self, work: _Work, drawn: Drawn) -> None:
        salt = work.request.salt
        work.request.seconds += drawn.seconds
        self.counts.seconds += drawn.seconds
        self.cache.put_num_pages(work.document, drawn.num_pages, salt)
        self._select(work, drawn.num_pages)
        for image in drawn.images:
            work.images[image.number] = image
            self.cache.put_page(work.document, image, work.size, salt)
        self._check_size(work)

    def _check_size(self, work: _Work) -> None:
        limit = self._limits.max_body_bytes
        num_bytes = sum(
            len(image.png) + len(image.text)
            for each in work.request.works
            for image in each.images.values()
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
                self._num_pages_left(work),
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


def num_processes(settings: DocumentSettings) -> int:
    """`max_processes`, by default as many as processors and memory allow."""
    num_fitting = machine.memory_bytes() // 4 // settings.max_draw_memory_bytes
    suitable = max(2, min(machine.num_cpus() + 1, _MAX_PROCESSES, num_fitting))
    return settings.max_processes or suitable


@dataclass(slots=True)
class _Request:
    """The documents of a request, and what it holds; `reserve` is told of that."""

    owner: str
    salt: str
    reserve: Reserve
    works: list[_Work] = field(default_factory=list)
    seconds: float = 0.0
    """Time that drawing them took, summed over the processes."""


@dataclass(slots=True, eq=False)
class _Work:
    """A document, and its pages so far, by number."""

    document: Document
    size: PageSize
    request: _Request
    num_pages: int | None = None
    numbers: list[int] = field(default_factory=list)
    """The pages wanted, once `num_pages` is known."""
    images: dict[int, PageImage] = field(default_factory=dict)
