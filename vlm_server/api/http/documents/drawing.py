"""The drawing of documents' pages, in processes started on demand, and kept for later requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import anyio
import anyio.to_thread
import msgspec

from vlm_server.api.fair_turns import FairTurns
from vlm_server.api.http.documents import messages, page_ranges
from vlm_server.api.http.documents.messages import DrawJob, Drawn, PageSize
from vlm_server.api.http.documents.page_cache import PageCache
from vlm_server.api.parsing.media.documents import Detail, Document, PageImage, Pages
from vlm_server.api.parsing.media.external import SentError
from vlm_server.errors import (
    EngineUnavailable,
    InvalidDocument,
    PayloadTooLarge,
    RequestError,
    RequestTooCostly,
)
from vlm_server.platform.child.cancellation import Cancellation
from vlm_server.platform.child.pool import ChildFailed, ChildNotStarted, ChildPool, ChildTimeout
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
        memory_bytes = self._settings.max_draw_memory_bytes
        seconds = self._settings.draw_timeout_seconds
        self._threads = anyio.CapacityLimiter(self._settings.max_processes)
        spared = max(1, self._settings.max_processes - 1)
        owner_limit = spared if settings.server.needs_key else self._settings.max_processes
        self._turns = FairTurns(self._settings.max_processes, owner_limit)
        self._slow_turns = FairTurns(spared)
        self._pool = ChildPool(
            _CHILD,
            self._settings.max_processes,
            str(memory_bytes),
            str(seconds),
            memory_bytes=memory_bytes,
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
        job = DrawJob(
            work.document,
            work.size,
            tuple(work.images),
            work.request.num_pages_left,
            self._limits.max_image_pixels,
        )
        owner = work.request.owner
        try:
            return await self._in_process(job, owner, seconds)
        except (ChildTimeout, ChildFailed) as error:
            work.request.seconds += seconds
            seconds = self._seconds_left(work)
            if seconds <= 0:
                raise self._failure(work, error) from None
        async with self._slow_turns.turn(owner):
            try:
                return await self._in_process(job, owner, seconds)
            except (ChildTimeout, ChildFailed) as error:
                raise self._failure(work, error) from None

    def _seconds_left(self, work: _Work) -> float:
        return self._settings.draw_timeout_seconds - work.request.seconds

    async def _in_process(self, job: DrawJob, owner: str, seconds: float) -> Drawn:
        """The outcome of `job`, in a turn of `owner`.

        Raises RequestError, ChildTimeout and ChildFailed.
        """
        cancellation = Cancellation()
        run = partial(self._pool.run, messages.encode(job), seconds, cancellation)
        try:
            async with self._turns.turn(owner):
                answer = await anyio.to_thread.run_sync(
                    run, abandon_on_cancel=True, limiter=self._threads
                )
        except ChildNotStarted as error:
            logger.warning("a process that draws pages %s", error)
            raise EngineUnavailable("The server is short of processes; try again later.") from None
        finally:
            cancellation.cancel()
        outcome = messages.decode_outcome.decode(answer)
        if isinstance(outcome, SentError):
            raise RequestError.from_code(outcome.code, outcome.message, outcome.param)
        return outcome

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
