"""The pages that a request asks for: `1-3,7`."""

from __future__ import annotations

import re

_MAX_CHARS = 1024
_RANGE = re.compile(r"([1-9][0-9]{0,8})(?:(-)([1-9][0-9]{0,8})?)?", re.ASCII)


class PagesError(Exception):
    """The pages can't be read, or are too many; the message is for the client."""


def select(text: str, num_pages: int, max_pages: int) -> list[int]:
    """The pages in `text`, ascending and each once, of a document of `num_pages`.

    Numbers start at 1, `5-` ends at the last page, and an empty text is all pages. Raises
    PagesError, also for more than `max_pages`.
    """
    ranges = [(1, num_pages)]
    if len(text) > _MAX_CHARS:
        raise PagesError(f"`pages` has more than {_MAX_CHARS} characters.")
    if text:
        ranges = [_range(part.strip(), num_pages) for part in text.split(",")]
    if any(last - first >= max_pages for first, last in ranges):
        raise _too_many(num_pages, max_pages)
    numbers = sorted({number for first, last in ranges for number in range(first, last + 1)})
    if len(numbers) > max_pages:
        raise _too_many(num_pages, max_pages)
    return numbers


def _range(text: str, num_pages: int) -> tuple[int, int]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise PagesError("`pages` must be numbers and ranges from 1 on, such as '1-3,7' or '5-'.")
    first = int(match[1])
    last = int(match[3]) if match[3] else num_pages if match[2] else first
    if max(first, last) > num_pages:
        raise PagesError(
            f"`pages` asks for page {max(first, last)}, and the document has {num_pages}."
        )
    if first > last:
        raise PagesError(f"`pages` has a range that ends before it begins: '{first}-{last}'.")
    return first, last


def _too_many(num_pages: int, max_pages: int) -> PagesError:
    choice = f", such as '1-{max_pages}'" if max_pages > 0 else ""
    return PagesError(
        f"The document has {num_pages} pages, of which at most {max(0, max_pages)} may be read "
        f"(limits.max_pages, over all documents of a request). Choose some with `pages`{choice}."
    )
