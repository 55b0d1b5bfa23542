"""The pages that a request asks for."""

from __future__ import annotations

import pytest

from vlm_server.api.http.documents.page_ranges import PagesError, select


@pytest.mark.parametrize(
    ("text", "pages"),
    [
        ("", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("1-3,7", [1, 2, 3, 7]),
        ("7, 1-3", [1, 2, 3, 7]),
        ("2,1-3,2", [1, 2, 3]),
        ("7-", [7, 8]),
        ("8", [8]),
    ],
)
def test_ranges_select_pages_in_order(text: str, pages: list[int]) -> None:
    assert select(text, num_pages=8, max_pages=8) == pages


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "numbers and ranges") for text in (",", "0", "-3", "1-2-3", "a", "1;2", "²", "٣")),
        *((text, "numbers and ranges") for text in ("1" * 10, "1-\n2", " ")),
        ("9", "page 9, and the document has 8"),
        ("1-999999999", "page 999999999, and the document has 8"),
        ("3-1", "ends before it begins"),
    ],
)
def test_malformed_ranges_are_refused(text: str, words: str) -> None:
    with pytest.raises(PagesError, match=words):
        select(text, num_pages=8, max_pages=8)


@pytest.mark.parametrize("text", ["", "1-4", "1,2,3,4", "5-"])
@pytest.mark.parametrize("max_pages", [3, 0, -2])
def test_more_pages_than_allowed_are_refused_with_figures(text: str, max_pages: int) -> None:
    with pytest.raises(PagesError, match=f"8 pages, of which at most {max(0, max_pages)}"):
        select(text, num_pages=8, max_pages=max_pages)


def test_pages_of_huge_documents_are_refused_at_once() -> None:
    with pytest.raises(PagesError, match="2147483647 pages"):
        select("", num_pages=2**31 - 1, max_pages=100)
