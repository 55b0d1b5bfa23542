"""Documents that are made to break readers: refused within bounds, and the next one is drawn."""

from __future__ import annotations

import asyncio
import io
import os
import random
import subprocess
import time

import pytest
from PIL import Image

from tests.support import pdf
from tests.support.waiting import until
from tests.unit.api.http.documents.documents import document, documents, pages_of, tiff
from vlm_server.errors import RequestError
from vlm_server.platform.child.cancellation import Cancelled
from vlm_server.settings import MIB

SECONDS = 5
"""The time limit of a document in these tests."""
GRACE_SECONDS = 10


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(pdf.encrypted(), "encrypted with a password", id="encrypted"),
        pytest.param(b"%PDF-1.7", "damaged, or cut off", id="nothing"),
        pytest.param(pdf.numbered(3)[:500], "damaged, or cut off", id="cut off"),
        pytest.param(pdf.looping_pages(), "can't be read", id="loop of pages"),
        pytest.param(pdf.numbered(10_000), "10000 pages, of which at most 100", id="10,000 pages"),
        pytest.param(pdf.bomb(2048 * MIB), "too much memory|took more than", id="bomb"),
        pytest.param(pdf.nested_forms(12, 10), "too much memory|took more than", id="forms"),
        pytest.param(pdf.looping_form(), "too much memory|took more than", id="loop of forms"),
        pytest.param(pdf.tiny_tiles(), "took more than 5 seconds", id="tiles"),
        pytest.param(pdf.write([pdf.Page((1e9, 1e9))]), "impossible size", id="endless page"),
        pytest.param(tiff(Image.new("I;16", (9, 9))), "more than 8 bits", id="deep TIFF"),
        pytest.param(tiff(Image.new("1", (9999, 9999))), "more than 50000000 pixels", id="TIFF"),
        pytest.param(b"II*\0" + bytes(100), "damaged", id="empty TIFF"),
    ],
)
async def test_hostile_documents_are_refused_in_time(data: bytes, words: str) -> None:
    drawing, started = documents(draw_timeout_seconds=SECONDS), time.monotonic()
    with pytest.raises(RequestError, match=words) as error:
        await pages_of(data, drawing)
    assert time.monotonic() - started < SECONDS + GRACE_SECONDS
    assert error.value.status in (400, 413)
    assert error.value.param == "messages[0].content[1]"
    assert len(await pages_of(pdf.numbered(2), drawing)) == 2


@pytest.mark.parametrize(
    "data", [pdf.picture_bomb(60_000), pdf.nested_forms(5000, 1), pdf.bomb(50 * MIB)]
)
async def test_odd_pages_are_drawn_as_far_as_they_go(data: bytes) -> None:
    assert len(await pages_of(data)) == 1


async def test_broken_page_is_named_and_others_are_drawn() -> None:
    good = pdf.numbered(3)
    broken = good.replace(b"/Type /Page /Parent 2 0 R", b"/Type /Pope /Parent 9 9 9", 1)
    with pytest.raises(RequestError, match="Page 1 of the document is broken or missing"):
        await pages_of(broken)
    assert [page.number for page in await pages_of(broken, pages="2-")] == [2, 3]


async def test_cancelled_drawing_frees_its_process() -> None:
    drawing = documents(max_processes=1, draw_timeout_seconds=60)
    task = asyncio.create_task(drawing.draw([document(pdf.tiny_tiles())], "", "", lambda _: None))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises((asyncio.CancelledError, Cancelled)):
        await task
    started = time.monotonic()
    assert len(await pages_of(pdf.numbered(1), drawing)) == 1
    assert time.monotonic() - started < GRACE_SECONDS


def drawing_processes() -> set[int]:
    """The processes that draw for this one."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid=,ppid=,args="], capture_output=True, text=True
    )
    words = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    return {
        int(pid)
        for pid, parent, arguments in words
        if int(parent) == os.getpid() and "documents.process" in arguments
    }


async def test_documents_of_request_are_drawn_at_once_but_leave_process_to_others() -> None:
    drawing = documents(max_processes=3, draw_timeout_seconds=60)
    slow = [document(pdf.tiny_tiles(), dpi=dpi) for dpi in (50, 60, 70)]
    task = asyncio.create_task(drawing.draw(slow, "", "", lambda _: None))
    await until(lambda: len(drawing_processes()) == 2)
    assert len(await pages_of(pdf.numbered(1), drawing)) == 1
    await until(lambda: len(drawing_processes()) == 2)
    task.cancel()
    with pytest.raises((asyncio.CancelledError, Cancelled)):
        await task
    await until(lambda: not drawing_processes())


async def test_refused_document_ends_drawing_of_others_in_request() -> None:
    drawing = documents(max_processes=3, draw_timeout_seconds=60)
    both = [document(pdf.tiny_tiles()), document(pdf.encrypted())]
    with pytest.raises(RequestError, match="encrypted"):
        await asyncio.wait_for(drawing.draw(both, "", "", lambda _: None), GRACE_SECONDS)
    await until(lambda: not drawing_processes())


async def test_documents_do_not_wait_for_hostile_ones() -> None:
    drawing = documents(max_processes=2, draw_timeout_seconds=60)
    hostile = [
        asyncio.create_task(
            drawing.draw([document(pdf.tiny_tiles(), dpi=dpi)], "", "", lambda _: None)
        )
        for dpi in (50, 60)
    ]
    await asyncio.sleep(9)  # now one of them draws in a slow turn, and one waits for that
    started = time.monotonic()
    for num_pages in range(1, 4):
        assert len(await pages_of(pdf.numbered(num_pages), drawing)) == num_pages
    assert time.monotonic() - started < GRACE_SECONDS
    for task in hostile:
        assert not task.done()
        task.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)


async def test_documents_do_not_wait_for_hostile_ones_of_another_key() -> None:
    drawing = documents(
        keys=("the-first-key", "the-second-key"), max_processes=2, draw_timeout_seconds=60
    )
    hostile = [
        asyncio.create_task(
            drawing.draw([document(pdf.tiny_tiles(), dpi=dpi)], "greedy", "", lambda _: None)
        )
        for dpi in range(50, 58)
    ]
    for num_pages in range(1, 7):  # beside first attempts, and beside a slow turn
        await asyncio.sleep(2)
        started = time.monotonic()
        assert len(await pages_of(pdf.numbered(num_pages), drawing, owner="modest")) == num_pages
        assert time.monotonic() - started < GRACE_SECONDS
    for task in hostile:
        assert not task.done()
        task.cancel()
    await asyncio.gather(*hostile, return_exceptions=True)


async def test_mutated_documents_are_drawn_or_refused() -> None:
    drawing, order = documents(draw_timeout_seconds=SECONDS, max_cache_bytes=0), random.Random(11)
    noise = Image.effect_noise((120, 80), 50)
    picture = io.BytesIO()
    noise.save(picture, "PDF", save_all=True, append_images=[noise])
    seeds = [pdf.numbered(2), picture.getvalue()]
    seeds += [tiff(noise, noise, compression=kind) for kind in (None, "tiff_lzw", "jpeg")]
    seeds.append(tiff(noise.convert("1"), compression="group4"))
    num_drawn, statuses = 0, set()
    for _ in range(60):
        data = bytearray(order.choice(seeds))
        for _ in range(order.choice((1, 3, 20))):
            data[order.randrange(8, len(data))] = order.randrange(256)
        try:
            num_drawn += len(await pages_of(bytes(data), drawing, include_text=True))
        except RequestError as error:
            statuses.add(error.status)
    assert num_drawn
    assert statuses <= {400, 413}
