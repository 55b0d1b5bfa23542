"""`POST /v1/documents/pages`: what it answers, within which bounds."""

from __future__ import annotations

import base64
import io

import httpx
import pytest
from PIL import Image

from tests.support import pdf
from tests.unit.api.conftest import Connect
from vlm_server.settings import Limits, Settings

ROUTE = "/v1/documents/pages"
TWO_PAGES = pdf.write([pdf.Page((300, 300)).text(60, 130, 70, word) for word in ("CUP", "SUN")])


async def test_pages_are_pngs_of_their_size(client: httpx.AsyncClient) -> None:
    answer = await client.post(f"{ROUTE}?max_pixels=10000", content=TWO_PAGES)
    assert answer.status_code == 200
    told = answer.json()
    assert (told["num_pages"], [page["page"] for page in told["pages"]]) == (2, [1, 2])
    for page in told["pages"]:
        image = Image.open(io.BytesIO(base64.b64decode(page["url"].partition(",")[2])))
        assert (image.format, image.size) == ("PNG", (page["width"], page["height"]))
        assert 9_000 < page["width"] * page["height"] <= 10_000


async def test_chosen_pages_are_drawn(client: httpx.AsyncClient) -> None:
    answer = await client.post(f"{ROUTE}?pages=2", content=TWO_PAGES)
    assert [page["page"] for page in answer.json()["pages"]] == [2]


@pytest.mark.parametrize(
    ("query", "content", "code"),
    [
        ("", b"no PDF", "invalid_document"),
        ("", b"", "invalid_document"),
        ("?pages=3", TWO_PAGES, "invalid_document"),
        ("?pages=x", TWO_PAGES, "invalid_document"),
        ("?pages=" + "1-," * 400 + "1", TWO_PAGES, "invalid_document"),
        ("?max_pixels=0", TWO_PAGES, "invalid_value"),
        ("?max_pixels=many", TWO_PAGES, "invalid_value"),
        ("?max_pixels=" + "9" * 5_000, TWO_PAGES, "invalid_value"),
    ],
)
async def test_wrong_document_or_query_is_refused(
    client: httpx.AsyncClient, query: str, content: bytes, code: str
) -> None:
    answer = await client.post(f"{ROUTE}{query}", content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code


async def test_pages_larger_than_unread_bytes_are_refused(connect: Connect) -> None:
    client = connect(Settings(limits=Limits(max_unread_bytes=1024)))
    answer = await client.post(ROUTE, content=TWO_PAGES)
    assert (answer.status_code, answer.json()["error"]["param"]) == (413, "pages")
    assert (
        await client.post(f"{ROUTE}?pages=1&max_pixels=1", content=TWO_PAGES)
    ).status_code == 200
