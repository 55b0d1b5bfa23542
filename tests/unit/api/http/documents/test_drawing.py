"""Documents drawn by the real process, and kept for later requests."""

from __future__ import annotations

import hashlib

import pytest
from msgspec.structs import replace
from PIL import Image

from tests.support import pdf
from tests.unit.api.http.documents.documents import document, documents, pages_of, pixels, tiff
from vlm_server.api.http.documents.drawing import num_processes
from vlm_server.errors import InvalidDocument, PayloadTooLarge, RequestError
from vlm_server.platform import machine
from vlm_server.settings import DocumentSettings, Limits

TEN = pdf.numbered(10)


async def test_pages_are_drawn_at_their_resolution() -> None:
    data = pdf.write([pdf.Page((360, 180)).rectangle(0, 90, 180, 90, "1 0 0")])
    (page,) = await pages_of(data, dpi=144)
    drawn = pixels(page)
    assert drawn.size == (720, 360)
    corners = [drawn.getpixel(at) for at in ((9, 9), (710, 9), (9, 350))]
    assert corners == [(255, 0, 0), (255, 255, 255), (255, 255, 255)]


@pytest.mark.parametrize(
    "size", [(595, 842), (14_400, 14_400), (9, 5000), (0.01, 14_400), (1e6, 1e6)]
)
async def test_pages_have_at_most_allowed_pixels(size: tuple[float, float]) -> None:
    (page,) = await pages_of(pdf.write([pdf.Page(size)]), max_pixels=50_000, dpi=1200)
    assert page.width * page.height <= 50_000


async def test_detail_changes_default_resolution() -> None:
    widths = [
        (await pages_of(TEN, detail=detail, pages="1"))[0].width
        for detail in ("low", "auto", "high")
    ]
    assert widths == [250, 500, 1000]


async def test_text_layer_is_read_on_request_alone() -> None:
    data = pdf.write([pdf.Page().text(50, 700, 30, "Sum (net): 4711").text(50, 600, 30, "paid")])
    assert (await pages_of(data))[0].text == ""
    assert (await pages_of(data, include_text=True))[0].text.split() == [
        "Sum",
        "(net):",
        "4711",
        "paid",
    ]


async def test_page_of_another_version_is_same_image() -> None:
    old, new = await pages_of(TEN), await pages_of(pdf.numbered(12, changed=4))
    hashes = [[hashlib.sha256(page.png).hexdigest() for page in pages] for pages in (old, new)]
    assert [number for number, same in enumerate(map(str.__eq__, *hashes), 1) if not same] == [4]


async def test_selected_pages_keep_their_numbers() -> None:
    every = await pages_of(TEN)
    assert await pages_of(TEN, pages="9-,2") == (every[1], every[8], every[9])


async def test_second_drawing_takes_pages_from_cache() -> None:
    drawing = documents()
    first = await pages_of(TEN, drawing, pages="1-4")
    seconds = drawing.counts.seconds
    assert await pages_of(TEN, drawing, pages="2-3") == first[1:3]
    assert (drawing.counts.cached_pages, drawing.counts.seconds) == (2, seconds)
    whole = await pages_of(TEN, drawing)
    assert whole == await pages_of(TEN)
    assert drawing.counts.cached_pages == 6
    assert drawing.counts.seconds > seconds


@pytest.mark.parametrize(
    "changed", [{"salt": "other"}, {"dpi": 60}, {"max_pixels": 9000}, {"include_text": True}]
)
async def test_cached_pages_are_shared_by_same_requests_alone(changed: dict[str, object]) -> None:
    drawing = documents()
    await pages_of(TEN, drawing)
    await pages_of(TEN, drawing, **changed)  # type: ignore[arg-type]
    assert drawing.counts.cached_pages == 0


async def test_cache_keeps_its_bounds() -> None:
    drawing = documents(max_cache_bytes=40_000)
    for _ in range(2):
        for number in range(1, 11):
            await pages_of(TEN, drawing, pages=str(number))
            assert 0 < drawing.cache.size_bytes <= 40_000
    drawing.cache.clear()
    assert (len(drawing.cache), drawing.cache.size_bytes) == (0, 0)


async def test_tiff_pages_are_drawn_like_pages_of_pdf() -> None:
    grey, colour = Image.new("L", (1700, 2200), 80), Image.new("RGBA", (1700, 2200), (255, 0, 0, 0))
    fax = Image.new("1", (1728, 1078), 1)
    for pages, dpi, expected in (
        ((grey, colour), (200, 200), (1020, 1320)),
        ((fax,), (204, 98), (1016, 1320)),
        ((grey,), None, (1700, 2200)),
        ((grey,), (72, 72), (1700, 2200)),
    ):
        data = tiff(*pages, **({"dpi": dpi} if dpi else {}))
        drawn = [pixels(page) for page in await pages_of(data)]
        assert [each.size for each in drawn] == [expected] * len(pages)
    drawn = [pixels(page).getpixel((5, 5)) for page in await pages_of(tiff(grey, colour))]
    assert drawn == [(80, 80, 80), (255, 255, 255)]


async def test_pages_are_limited_over_all_documents() -> None:
    drawing = documents(Limits(max_pages=11))
    both = [document(TEN), document(pdf.numbered(2))]
    with pytest.raises(InvalidDocument, match="2 pages, of which at most 1 may be read") as error:
        await drawing.draw(both, "", "", lambda _: None)
    assert error.value.param == "messages[0].content[1]"
    await drawing.draw([both[0], document(pdf.numbered(2), pages="2")], "", "", lambda _: None)


async def test_too_many_pages_are_those_of_later_document() -> None:
    """Whichever is drawn first."""
    for first, second in ((TEN, pdf.numbered(2)), (pdf.numbered(2), TEN)):
        both = [document(first), replace(document(second), param="second")]
        drawing = documents(Limits(max_pages=11), max_processes=3)
        for _ in range(2):  # drawn, and from the cache
            with pytest.raises(InvalidDocument, match="may be read") as error:
                await drawing.draw(both, "", "", lambda _: None)
            assert error.value.param == "second"


async def test_number_of_processes_is_one_more_than_processors_within_memory() -> None:
    fit = machine.memory_bytes() // 3
    expected = max(2, min(machine.num_cpus() + 1, 5))
    for settings, number in (
        (DocumentSettings(max_draw_memory_bytes=fit // 5), expected),
        (DocumentSettings(max_draw_memory_bytes=fit), 2),
        (DocumentSettings(max_processes=1), 1),
    ):
        assert num_processes(settings) == number


async def test_pictures_of_pages_are_limited_in_bytes() -> None:
    drawing = documents(Limits(max_body_bytes=50_000))
    with pytest.raises(PayloadTooLarge, match=r"more than 50000 bytes as pictures .* `max_pixels`"):
        await pages_of(TEN, drawing)
    assert len(await pages_of(TEN, drawing, pages="1-3")) == 3


async def test_settings_are_defaults_of_size() -> None:
    (page,) = await pages_of(TEN, documents(dpi=72), pages="1")
    assert (page.width, page.height) == (300, 300)
    (page,) = await pages_of(TEN, documents(max_pixels=2500), pages="1")
    assert (page.width, page.height) == (50, 50)
    (page,) = await pages_of(
        TEN, documents(Limits(max_image_pixels=2500)), pages="1", max_pixels=9000
    )
    assert (page.width, page.height) == (50, 50), "a limit holds whatever is asked for"


async def test_bytes_that_are_no_document_are_refused_by_name() -> None:
    for data, words in (
        (b"GIF89a", "looks like GIF"),
        (b"PK\3\4", "looks like ZIP"),
        (b"x", "PDF or TIFF"),
    ):
        with pytest.raises(RequestError, match=words):
            document(data)


async def test_held_bytes_are_reserved_while_drawing() -> None:
    held: list[int] = []
    drawing = documents()
    for _ in range(2):
        held.clear()
        pages = (await drawing.draw([document(TEN)], "", "", held.append)).popitem()[1]
        assert held[0] == len(TEN)
        assert held[-1] == len(TEN) + pages.num_bytes


async def test_limits_hold_for_cached_pages_too() -> None:
    drawing = documents(Limits(max_body_bytes=50_000))
    for number in range(1, 11):
        await pages_of(TEN, drawing, pages=str(number))
    with pytest.raises(PayloadTooLarge, match="50000 bytes"):
        await pages_of(TEN, drawing)


async def test_time_limit_is_one_for_all_documents() -> None:
    drawing = documents(draw_timeout_seconds=0.001)
    with pytest.raises(RequestError, match="took more than"):
        await pages_of(TEN, drawing)
    drawing = documents(draw_timeout_seconds=3)
    slow = [document(pdf.bomb(40 << 20), pages="1", dpi=dpi) for dpi in range(20, 60)]
    with pytest.raises(RequestError, match="took more than 3 seconds"):
        await drawing.draw(slow, "", "", lambda _: None)


async def test_more_documents_than_pages_are_refused_at_once() -> None:
    drawing = documents(Limits(max_pages=3))
    with pytest.raises(RequestError, match="4 documents, and at most 3 pages"):
        await drawing.draw([document(pdf.numbered(1))] * 4, "", "", lambda _: None)
    assert drawing.counts.seconds == 0
