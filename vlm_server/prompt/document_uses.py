"""Documents as a model sees them, and advice if media are too much for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from vlm_server.errors import ContextLengthExceeded
from vlm_server.prompt.media.processor import MediaItem
from vlm_server.protocol import DocumentPage, DocumentUse, Submit

_SHARE_FOR_PAGES = 0.9
"""The part of the context that a proposal fills with pages; texts and the answer get the rest."""


def document_uses(media: Iterable[MediaItem]) -> tuple[DocumentUse, ...]:
    """Pages, pixels and tokens of each document among `media`."""
    paged = ((item, item.page) for item in media if item.page is not None)
    uses = []
    for (_, num_pages), items in groupby(paged, lambda each: _document(each[1])):
        shown = list(items)
        uses.append(
            DocumentUse(
                pages=tuple(page.number for _, page in shown),
                num_pages=num_pages,
                pixels=sum(math.prod(item.layout.size or (0, 0)) for item, _ in shown),
                tokens=sum(len(item.layout.token_ids) for item, _ in shown),
            )
        )
    return tuple(uses)


class Room(NamedTuple):
    """The context of a model, and the tokens of a request's texts in it; `min_pixels` has each of
    its images at least."""

    context_tokens: int
    text_tokens: int
    min_pixels: int


def media_too_long(submit: Submit, media: Sequence[MediaItem], room: Room) -> ContextLengthExceeded:
    """The error for a request whose `media`, up to the last one of them, fill the context."""
    num_tokens = sum(len(item.layout.token_ids) for item in media)
    last = media[-1]
    if last.page is None:
        text = f"the images and videos up to this one have {num_tokens} tokens"
        advice = "Send fewer, or smaller ones."
    else:
        text = f"up to page {last.page.number} of the document, the pages have {num_tokens} tokens"
        advice = _advice(submit, media, room)
    return ContextLengthExceeded.of_prompt(room.context_tokens, f"{text}. {advice}", last.param)


def _advice(submit: Submit, media: Sequence[MediaItem], room: Room) -> str:
    """A proposal of fewer pages, and one of fewer pixels a page, that leave a tenth of the context.

    The texts are counted as if they were the pages' own.
    """
    pages = [item for item in media if item.page is not None]
    num_wanted = sum(image.page is not None for image in submit.images)
    page_tokens = sum(len(item.layout.token_ids) for item in pages) / len(pages)
    usable = _SHARE_FOR_PAGES * room.context_tokens
    proposals = []
    if num_fitting := int(usable / (page_tokens + room.text_tokens / num_wanted)):
        proposals.append(f"at most {num_fitting} of the {num_wanted} pages (`pages`)")
    sizes = [math.prod(item.layout.size) for item in pages if item.layout.size is not None]
    left_tokens = max(0.0, usable - room.text_tokens)
    pixels = sum(sizes) / len(pages) * left_tokens / (page_tokens * num_wanted)
    if pixels > room.min_pixels:
        proposals.append(f"pages of {_rounded(pixels)} pixels (`max_pixels`)")
    each = f"They have about {round(page_tokens)} tokens each"
    if not proposals:
        return f"{each}, and the texts {room.text_tokens}: send less of both."
    return f"{each}: ask about {', or '.join(proposals)}."


def _rounded(pixels: float) -> int:
    """The number below `pixels` with two digits and zeros."""
    step: int = 10 ** max(0, int(math.log10(max(pixels, 1))) - 1)
    return int(pixels // step) * step


def _document(page: DocumentPage | None) -> tuple[int, int]:
    assert page is not None
    return page.document, page.num_pages
