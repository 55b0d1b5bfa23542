"""`POST /v1/documents/pages`: the pages of a document as pictures, as a model would see them."""

from __future__ import annotations

import base64
import re
from functools import partial

import anyio.to_thread
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from vlm_server.api.http import access_log, body
from vlm_server.api.http.access import keys
from vlm_server.api.http.generation import Generation, context_of
from vlm_server.api.http.queue.queue_slots import QueueSlot
from vlm_server.api.parsing.media.documents import Document, PageOptions, Pages, read_header
from vlm_server.api.parsing.media.external import MediaUrl
from vlm_server.errors import InvalidRequest, PayloadTooLarge

_PIXELS = re.compile("[1-9][0-9]{0,11}")


class DrawnPage(msgspec.Struct, frozen=True):
    """A page: its number, from 1, its size in pixels, and a PNG as a data URL."""

    page: int
    width: int
    height: int
    url: str


class DocumentPages(msgspec.Struct, frozen=True):
    """The answer: the pages that were asked for, of the document's `num_pages`."""

    num_pages: int
    pages: tuple[DrawnPage, ...]
    object: str = "document.pages"


class DocumentPreview:
    """Draws pages within the bounds of a question about them; a client that leaves ends it."""

    def __init__(self, shared: Generation) -> None:
        self._shared = shared

    async def draw(self, request: Request) -> Response:
        """Raises RequestError and ClientGone."""
        shared, client = self._shared, keys.key_of(request.scope).name
        options = _options(request)
        body.check_headers(request.headers, shared.limits, any_type=True)
        shared.queue_slots.check(client, request.headers)
        data = await body.read(request.receive, shared.limits, shared.arriving)
        source = MediaUrl("", "body", "document", shared.limits.max_document_bytes)
        if len(data) > source.max_bytes:
            raise source.too_large()
        read = partial(read_header, bytes(data), source, options)
        body.discard(data)
        document = await anyio.to_thread.run_sync(read)
        with shared.queue_slots.hold(client, len(document.data)) as slot:
            drawing = self._pages(document, slot, request)
            pages = await body.until_disconnect(request.receive, drawing)
            _check_size(pages, shared.limits.max_unread_bytes)
            entry = access_log.entry_of(request.scope)
            entry.documents, entry.pages = 1, len(pages.images)
            answer = await anyio.to_thread.run_sync(_encode, pages)
        return Response(answer, media_type="application/json")

    async def _pages(self, document: Document, slot: QueueSlot, request: Request) -> Pages:
        shared, entry = self._shared, access_log.entry_of(request.scope)
        context = context_of(shared, request.scope, entry.request_id)
        drawn = await shared.documents.draw(
            [document], context.owner, context.cache_salt, slot.reserve
        )
        return drawn[document.key]


def _options(request: Request) -> PageOptions:
    """The query's `pages` and `max_pixels`. Raises InvalidRequest."""
    query = request.query_params
    text = query.get("max_pixels")
    if text is not None and not _PIXELS.fullmatch(text):
        raise InvalidRequest("`max_pixels` must be a number of pixels, 1 or more.", "max_pixels")
    return PageOptions(query.get("pages", ""), max_pixels=int(text) if text else None)


def _check_size(pages: Pages, max_bytes: int) -> None:
    """Raises PayloadTooLarge if an answer in base64 has more bytes than may wait for a client."""
    if 4 * pages.num_bytes > 3 * max_bytes:
        raise PayloadTooLarge(
            f"The pages take more than {max_bytes} bytes (limits.max_unread_bytes): ask for fewer, "
            "with `pages`, or for smaller ones, with `max_pixels`.",
            "pages",
        )


def _encode(pages: Pages) -> bytes:
    drawn = tuple(
        DrawnPage(
            image.number,
            image.width,
            image.height,
            f"data:image/png;base64,{base64.b64encode(image.png).decode()}",
        )
        for image in pages.images
    )
    return msgspec.json.encode(DocumentPages(pages.num_pages, drawn))
