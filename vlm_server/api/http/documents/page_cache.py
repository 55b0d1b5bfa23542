"""Drawn pages kept for later requests: the next question about a document draws nothing."""

from __future__ import annotations

from collections import OrderedDict

from vlm_server.api.http.documents.messages import PageSize
from vlm_server.api.parsing.media.documents import Document, PageImage

_OVERHEAD_BYTES = 512
"""Bytes counted for an entry in addition to its content."""


class PageCache:
    """Pages, and numbers of pages, by document; the least recently used go first.

    Those of requests with different cache salts are never shared. Use from one thread.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._entries: OrderedDict[object, PageImage | int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def num_pages(self, document: Document, salt: str) -> int | None:
        """The number of the document's pages; None if unknown."""
        entry = self._get((salt, document.digest))
        return entry if isinstance(entry, int) else None

    def page(self, document: Document, number: int, size: PageSize, salt: str) -> PageImage | None:
        """Page `number` in that size, with its text if the document's options want that."""
        entry = self._get(_page_key(document, number, size, salt))
        return entry if isinstance(entry, PageImage) else None

    def put_num_pages(self, document: Document, num_pages: int, salt: str) -> None:
        self._put((salt, document.digest), num_pages)

    def put_page(self, document: Document, page: PageImage, size: PageSize, salt: str) -> None:
        self._put(_page_key(document, page.number, size, salt), page)

    def clear(self) -> None:
        self._entries.clear()
        self.size_bytes = 0

    def _get(self, key: object) -> PageImage | int | None:
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def _put(self, key: object, entry: PageImage | int) -> None:
        previous = self._entries.pop(key, None)
        if previous is not None:
            self.size_bytes -= _size(previous)
        self._entries[key] = entry
        self.size_bytes += _size(entry)
        while self.size_bytes > self.limit_bytes:
            self.size_bytes -= _size(self._entries.popitem(last=False)[1])


def _page_key(document: Document, number: int, size: PageSize, salt: str) -> object:
    return salt, document.digest, number, size, document.options.include_text


def _size(entry: PageImage | int) -> int:
    content = len(entry.png) + 4 * len(entry.text) if isinstance(entry, PageImage) else 0
    return content + _OVERHEAD_BYTES
