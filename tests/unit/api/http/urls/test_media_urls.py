"""Requests with `https:` and `file:` URLs, read in the process for media URLs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.support.image_files import image_file
from tests.unit.api.conftest import Connect
from tests.unit.api.http.urls.test_fetch import NAMES
from tests.unit.api.http.urls.tls_server import Serve, TlsServer, page, tls_server
from tests.unit.api.requests import PNG_URL, ROUTE, chat, image_part, text, user
from tests.unit.api.scripted_engine import ScriptedEngine
from vlm_server.api.http.urls.media_urls import MediaUrls
from vlm_server.api.parsing.media.external import MediaUrl
from vlm_server.errors import InvalidImage, InvalidVideo, PayloadTooLarge, RequestError
from vlm_server.settings import Limits, Settings, Urls

PNG = image_file("PNG", (40, 30))
LIMIT = 100_000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a.png").write_bytes(PNG)
    (folder / "b.jpg").write_bytes(image_file("JPEG", (8, 8)))
    (folder / "notes.txt").write_text("swordfish")
    return folder


@pytest.fixture
def open_client(connect: Connect, root: Path) -> httpx.AsyncClient:
    return connect(Settings(urls=Urls(https_hosts=("*",), file_folders=(str(root),))))


def file_url(root: Path, name: str = "a.png") -> str:
    return f"file://{root}/{name}"


async def error_of(client: httpx.AsyncClient, *urls: str, status: int = 400) -> dict[str, str]:
    answer = await client.post(ROUTE, json=chat(user(text(), *map(image_part, urls))))
    assert answer.status_code == status, answer.text
    error: dict[str, str] = answer.json()["error"]
    return error


async def test_file_images_keep_their_place_among_images(
    open_client: httpx.AsyncClient, engine: ScriptedEngine, root: Path
) -> None:
    urls = [file_url(root), PNG_URL, file_url(root, "b.jpg"), file_url(root)]
    answer = await open_client.post(ROUTE, json=chat(user(*map(image_part, urls))))
    assert answer.status_code == 200, answer.text
    (submit,) = engine.submitted
    assert [(i.format, i.width, i.height) for i in submit.images] == [
        ("PNG", 40, 30), ("PNG", 4, 3), ("JPEG", 8, 8), ("PNG", 40, 30),
    ]  # fmt: skip
    assert [part.index for part in submit.messages[0].content] == [0, 1, 2, 3]  # type: ignore[union-attr]
    assert submit.images[0].param == "messages[0].content[0]"


async def test_file_has_cache_key_of_its_bytes(
    open_client: httpx.AsyncClient, engine: ScriptedEngine, root: Path
) -> None:
    (root / "a.png").write_bytes(image_file("PNG"))
    for url in (PNG_URL, file_url(root)):
        await open_client.post(ROUTE, json=chat(user(image_part(url))))
    from_file, other = engine.submitted
    assert from_file.images[0].content_hash == other.images[0].content_hash


@pytest.mark.parametrize(
    ("url", "words"),
    [("https://example.org/a.png", "fetches no"), ("file:///etc/passwd", "reads no")],
)
async def test_https_and_file_urls_are_off_by_default(
    client: httpx.AsyncClient, engine: ScriptedEngine, url: str, words: str
) -> None:
    error = await error_of(client, url)
    assert (error["param"], error["code"]) == ("messages[0].content[1]", "invalid_image")
    assert words in error["message"]
    assert engine.submitted == []


async def test_https_and_file_urls_are_enabled_separately(connect: Connect, root: Path) -> None:
    files = connect(Settings(urls=Urls(file_folders=(str(root),))))
    assert "fetches no" in (await error_of(files, "https://example.org/"))["message"]
    web = connect(Settings(urls=Urls(https_hosts=("*",))))
    assert "reads no" in (await error_of(web, file_url(root)))["message"]


BAD = [
    "file:///etc/passwd", "file://{root}/absent.png", "file://{root}/../x", "file://{root}/notes.txt",
    "file://{root}", "https://127.0.0.1/a.png", "https://[::1]/a.png", "https://2130706433/",
    "https://user@example.org/", "https://example.org\\@127.0.0.1/", "https://example.org:1/",
]  # fmt: skip


async def test_bad_url_error_names_only_its_part(
    open_client: httpx.AsyncClient, engine: ScriptedEngine, root: Path
) -> None:
    for url in BAD:
        error = await error_of(open_client, PNG_URL, url.format(root=root))
        assert (error["param"], error["code"]) == ("messages[0].content[2]", "invalid_image")
        for secret in ("passwd", str(root), "127", "example", "swordfish"):
            assert secret not in error["message"], url
    assert engine.submitted == []


async def test_outside_files_are_refused_alike_if_absent_or_present(
    open_client: httpx.AsyncClient, root: Path
) -> None:
    urls = ("file:///etc/passwd", "file:///etc/absent", "file:///etc", f"file://{root}/absent")
    assert len({(await error_of(open_client, url))["message"] for url in urls}) == 1


async def test_invalid_request_reads_no_file(open_client: httpx.AsyncClient, root: Path) -> None:
    wrong = user(image_part(file_url(root, "absent.png")), image_part("data:image/png;base64,!!!!"))
    answer = await open_client.post(ROUTE, json=chat(wrong))
    assert answer.json()["error"]["param"] == "messages[0].content[1]"


async def test_file_images_obey_limits(connect: Connect, root: Path) -> None:
    urls = Urls(file_folders=(str(root),))
    small = connect(Settings(urls=urls, limits=Limits(max_image_bytes=len(PNG) - 1)))
    error = await error_of(small, file_url(root), status=413)
    assert (error["code"], error["param"]) == ("payload_too_large", "messages[0].content[1]")
    (root / "noise").write_bytes(PNG + bytes(1500))
    (root / "more").write_bytes(PNG + bytes(1500))
    tight = connect(Settings(urls=urls, limits=Limits(max_body_bytes=2000)))
    assert (
        "together"
        in (await error_of(tight, file_url(root, "noise"), file_url(root, "more"), status=413))[
            "message"
        ]
    )
    few = connect(Settings(urls=urls, limits=Limits(max_images=1)))
    assert "At most 1 images" in (await error_of(few, file_url(root), file_url(root)))["message"]
    shown = connect(Settings(urls=urls, limits=Limits(max_image_pixels=1199)))
    assert "pixels" in (await error_of(shown, file_url(root)))["message"]


# What comes from the network.


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[TlsServer]:
    async with tls_server(tmp_path, *NAMES) as tls:
        tls.pages["/a.png"] = page(PNG)
        yield tls


def media_urls(server: TlsServer, seconds: float = 10.0, limits: Limits | None = None) -> MediaUrls:
    urls = Urls(https_hosts=("*",), timeout_seconds=seconds)
    child = (
        "tests.unit.api.http.urls.near_media_url_child",
        str(server.port),
        str(server.certificate),
    )
    return MediaUrls(urls, limits or Limits(), *child)


def external(server: TlsServer, path: str = "/a.png", kind: str = "image") -> MediaUrl:
    url = f"https://pictures.example:{server.port}{path}"
    return MediaUrl(url, f"messages[0].content[{path}]", kind, LIMIT)  # type: ignore[arg-type]


async def test_urls_are_fetched_concurrently_and_mapped(server: TlsServer) -> None:
    together = asyncio.Barrier(3)

    def waiting(body: bytes) -> Serve:
        async def serve(writer: asyncio.StreamWriter) -> None:
            await together.wait()
            writer.write(page(body))

        return serve

    urls = [external(server, f"/{i}") for i in range(3)]
    server.pages |= {f"/{i}": waiting(str(i).encode()) for i in range(3)}
    fetched = await media_urls(server).read(urls, "")
    assert fetched == {url.url: str(i).encode() for i, url in enumerate(urls)}


async def silent(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def trickle(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("slow", [silent, trickle])
async def test_slow_fetch_ends_at_time_limit(server: TlsServer, slow: Serve) -> None:
    server.pages["/slow"] = slow
    reader = media_urls(server, seconds=2)
    started = time.monotonic()
    with pytest.raises(InvalidImage, match="not arrive within 2 seconds") as caught:
        await reader.read([external(server), external(server, "/slow")], "")
    assert time.monotonic() - started < 10
    assert caught.value.param == "messages[0].content[/slow]"
    assert (await reader.read([external(server)], "")) == {external(server).url: PNG}


@pytest.mark.parametrize(
    ("path", "kind", "error", "words"),
    [
        ("/absent", "image", InvalidImage, "The image was not sent: the status .* 404"),
        ("/absent", "video", InvalidVideo, "The video was not sent"),
        ("/large", "video", PayloadTooLarge, "The video is larger than 100000 bytes"),
    ],
)
async def test_first_failing_url_is_named(
    server: TlsServer, path: str, kind: str, error: type[RequestError], words: str
) -> None:
    server.pages["/slow"] = silent
    server.pages["/large"] = page(bytes(LIMIT + 1))
    urls = [external(server), external(server, "/slow"), external(server, path, kind)]
    with pytest.raises(error, match=words) as caught:
        await media_urls(server).read(urls, "")
    assert caught.value.param == f"messages[0].content[{path}]"


async def test_total_fetched_bytes_are_bounded(server: TlsServer) -> None:
    server.pages |= {f"/{i}": page(bytes(40_000)) for i in range(3)}
    reader = media_urls(server, limits=Limits(max_body_bytes=100_000))
    with pytest.raises(PayloadTooLarge, match="100000 bytes together"):
        await reader.read([external(server, f"/{i}") for i in range(3)], "")
    assert len(await reader.read([external(server, f"/{i}") for i in range(2)], "")) == 2


async def test_cancelled_fetch_closes_its_connection_at_once(server: TlsServer) -> None:
    is_asked, is_gone = asyncio.Event(), asyncio.Event()

    async def never(writer: asyncio.StreamWriter) -> None:
        is_asked.set()
        try:
            while True:
                writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
                await writer.drain()
                await asyncio.sleep(0.05)
        finally:
            is_gone.set()

    server.pages["/never"] = never
    reader = media_urls(server, seconds=60)
    reading = asyncio.create_task(reader.read([external(server, "/never")], ""))
    async with asyncio.timeout(20):
        await is_asked.wait()
        reading.cancel()
        await asyncio.wait([reading])
        await is_gone.wait()
    assert reading.cancelled()
    assert await reader.read([external(server)], "")


async def test_flood_of_tiny_chunks_ends_at_time_limit(server: TlsServer) -> None:
    async def flood(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"1\r\nx\r\n" * 1000)
            await writer.drain()

    server.pages["/flood"] = flood
    with pytest.raises(RequestError):
        await media_urls(server, seconds=1).read([external(server, "/flood")], "")
