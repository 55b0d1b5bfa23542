"""Fetching over real TLS from a server on loopback, with a fake resolver and address rule."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.api.http.urls.tls_server import TlsServer, page, redirect, tls_server
from vlm_server.api.http.urls import public_address
from vlm_server.api.http.urls.fetch import Fetcher, FetchError, TooLarge

IMAGE = bytes(range(256)) * 40
LIMIT = 20_000
NAMES = ("pictures.example", "other.example", "127.0.0.1")
HOME = {"pictures.example": ["127.0.0.1"], "other.example": ["127.0.0.1"]}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[TlsServer]:
    async with tls_server(tmp_path, *NAMES) as tls:
        tls.pages["/a.png"] = page(IMAGE)
        yield tls


class Resolver:
    """A fake resolver of some names; records the names it was asked for."""

    def __init__(self, addresses: dict[str, list[str]] | None = None) -> None:
        self.addresses = HOME | (addresses or {})
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        found = self.addresses.get(host)
        if found is None:
            raise socket.gaierror("unknown")
        return found


def is_ours(address: str) -> bool:
    """127.0.0.1 stands for the public internet here."""
    return address == "127.0.0.1" or public_address.is_public(address)


def fetcher(server: TlsServer, resolver: Resolver | None = None, *hosts: str) -> Fetcher:
    return Fetcher(
        hosts or ("*",),
        port=server.port,
        resolve=resolver or Resolver(),
        is_allowed=is_ours,
        context=server.trusting,
    )


def url(server: TlsServer, path: str = "/a.png", host: str = "pictures.example") -> str:
    return f"https://{host}:{server.port}{path}"


async def fetch(server: TlsServer, path: str, host: str = "pictures.example") -> bytes:
    return await fetcher(server).fetch(url(server, path, host), LIMIT)


async def test_fetch_connects_to_checked_address_by_name(server: TlsServer) -> None:
    resolver = Resolver()
    assert await fetcher(server, resolver).fetch(url(server), LIMIT) == IMAGE
    assert resolver.asked == ["pictures.example"]
    assert server.server_names == ["pictures.example"]
    (head,) = server.asked
    lines = head.lower().split("\r\n")
    assert lines[0] == "get /a.png http/1.1"
    assert f"host: pictures.example:{server.port}" in lines
    assert "accept-encoding: identity" in lines
    assert not [line for line in lines if line.startswith(("cookie", "authorization"))]


@pytest.mark.parametrize(
    "spelling",
    ["HTTPS://Pictures.Example:{port}/a.png", "https://pictures.example.:{port}/a.png",
     "https://pictures.example:{port}/a.png#part", "https://127.0.0.1:{port}/a.png"],
)  # fmt: skip
async def test_fetch_accepts_harmless_url_spellings(server: TlsServer, spelling: str) -> None:
    resolver = Resolver({"127.0.0.1": ["127.0.0.1"]})
    fetched = await fetcher(server, resolver).fetch(spelling.format(port=server.port), LIMIT)
    assert fetched == IMAGE


async def test_fetch_sends_query_verbatim(server: TlsServer) -> None:
    server.pages["/?q=%20@:b%2F"] = page(IMAGE)
    assert await fetch(server, "?q=%20@:b%2F") == IMAGE
    server.pages["/a%2e%2e/b;c"] = page(IMAGE)
    assert await fetch(server, "/a%2e%2e/b;c") == IMAGE


@pytest.mark.parametrize(
    "bad",
    ["http://pictures.example/a.png", "http://pictures.example:{port}/a.png", "ftp://pictures.example/",
     "//pictures.example/a.png", "https:/pictures.example/a.png", "https:pictures.example",
     "https://", "https:///a.png", "https://user@pictures.example:{port}/a.png",
     "https://user:word@pictures.example:{port}/a.png", "https://@pictures.example:{port}/a.png",
     "https://pictures.example:{port}\\@evil.example/a.png", "https://evil.example\\@pictures.example:{port}/",
     "https://pictures.example:{port}/\\..\\a.png", "https:\\\\pictures.example:{port}/a.png",
     "https://pictures.example :{port}/a.png", " https://pictures.example:{port}/a.png",
     "https://pictures.example:{port}/a.png\n", "https://pictures.example:{port}/a.png\r\nX: y",
     "https://pictures.example:{port}/a b", "https://pictures.example:{port}/\u00e9",
     "https://\uff50ictures.example:{port}/a.png", "https://pictures\u3002example:{port}/a.png",
     "https://pictures.example%2f:{port}/a.png", "https://[::1%25lo]:{port}/", "https://[::1%lo]:{port}/",
     "https://[::1:{port}/a.png", "https://pictures.example:{port}0000/a.png",
     "https://pictures.example:-1/a.png", "https://pictures.example:/a.png",
     "https://pictures.example:{port}/" + "a" * 5000],
)  # fmt: skip
async def test_fetch_refuses_other_urls_before_lookup(server: TlsServer, bad: str) -> None:
    resolver = Resolver()
    with pytest.raises(FetchError, match=r"plain `https:` URL|usual port"):
        await fetcher(server, resolver).fetch(bad.format(port=server.port), LIMIT)
    assert (resolver.asked, server.connections) == ([], 0)


async def test_fetch_refuses_another_port(server: TlsServer) -> None:
    with pytest.raises(FetchError, match="usual port"):
        await fetcher(server).fetch("https://pictures.example/a.png", LIMIT)
    assert server.connections == 0


INNER = [
    "127.0.0.2", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "100.100.100.200", "168.63.129.16", "224.0.0.1", "255.255.255.255", "::1", "::",
    "::ffff:10.0.0.1", "::ffff:7f00:2", "64:ff9b::a00:1", "64:ff9b::7f00:1", "64:ff9b:1::1",
    "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "2002:7f00:1::", "2001:0:1::", "2001:db8::1",
    "::127.0.0.1", "fec0::1", "fe80::1%lo", "nonsense",
]  # fmt: skip


@pytest.mark.parametrize("address", INNER)
async def test_fetch_never_connects_to_inner_addresses(server: TlsServer, address: str) -> None:
    for addresses in ([address], ["127.0.0.1", address], [address, "127.0.0.1"]):
        resolver = Resolver({"pictures.example": addresses})
        with pytest.raises(FetchError, match="without a public address"):
            await fetcher(server, resolver).fetch(url(server), LIMIT)
    assert server.connections == 0


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "0", "0.0.0.0", "[::1]",
     "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]", "[::]", "localhost",
     "localhost.", "10.0.0.1", "192.168.0.1", "100.64.0.1", "169.254.169.254",
     "[fd00:ec2::254]", "[fe80::1]"],
)  # fmt: skip
async def test_real_resolver_passes_no_inner_address(server: TlsServer, host: str) -> None:
    real = Fetcher(("*",), port=server.port, context=server.trusting)
    with pytest.raises(FetchError, match="without a public address"):
        await real.fetch(url(server, host=host), LIMIT)
    assert server.connections == 0


async def test_dns_rebinding_does_not_change_checked_address(server: TlsServer) -> None:
    resolver = Resolver()
    answers = iter((["127.0.0.1"], ["10.0.0.1"], ["10.0.0.1"]))

    async def rebinding(host: str, port: int) -> list[str]:
        resolver.asked.append(host)
        return next(answers)

    pinned = Fetcher(("*",), server.port, rebinding, is_ours, server.trusting)
    assert await pinned.fetch(url(server), LIMIT) == IMAGE
    assert len(resolver.asked) == 1
    with pytest.raises(FetchError, match="public address"):
        await pinned.fetch(url(server), LIMIT)


async def test_fetch_tries_next_address(server: TlsServer) -> None:
    def is_near(address: str) -> bool:
        return address.startswith("127.")

    resolver = Resolver({"pictures.example": ["127.0.0.9", "127.0.0.1"]})
    near = Fetcher(("*",), server.port, resolver, is_near, server.trusting)
    assert await near.fetch(url(server), LIMIT) == IMAGE


@pytest.mark.parametrize(
    ("host", "patterns", "is_named"),
    [
        ("pictures.example", ("pictures.example",), True),
        ("PICTURES.example", ("Pictures.Example",), True),
        ("pictures.example", ("*.example",), True),
        ("pictures.example", ("other.example", "*"), True),
        ("pictures.example", ("other.example",), False),
        ("pictures.example", ("*.pictures.example",), False),
        ("pictures.example", ("*.xample",), False),
        ("pictures.example", ("ictures.example",), False),
        ("other.example", ("pictures.example",), False),
    ],
)
async def test_fetch_allows_only_named_hosts(
    server: TlsServer, host: str, patterns: tuple[str, ...], is_named: bool
) -> None:
    resolver = Resolver()
    fetching = fetcher(server, resolver, *patterns).fetch(url(server, host=host), LIMIT)
    if is_named:
        assert await fetching == IMAGE
        return
    with pytest.raises(FetchError, match=r"urls\.https_hosts"):
        await fetching
    assert resolver.asked == []


async def test_fetch_refuses_invalid_certificates(server: TlsServer, tmp_path: Path) -> None:
    resolver = Resolver({"wrong.example": ["127.0.0.1"]})
    with pytest.raises(FetchError, match="valid certificate"):
        await fetcher(server, resolver).fetch(url(server, host="wrong.example"), LIMIT)
    distrusting = Fetcher(("*",), server.port, resolver, is_ours)
    with pytest.raises(FetchError, match="valid certificate"):
        await distrusting.fetch(url(server), LIMIT)
    assert server.asked == []


async def test_redirects_are_followed(server: TlsServer) -> None:
    server.pages["/1"] = redirect("/2", "301 Moved")
    server.pages["/2"] = redirect(url(server, "/3", "other.example"), "307 Temporary")
    server.pages["/3"] = redirect("a.png", "308 Permanent")
    assert await fetch(server, "/1") == IMAGE
    assert server.server_names == ["pictures.example"] * 2 + ["other.example"] * 2


async def test_four_redirects_or_loop_are_refused(server: TlsServer) -> None:
    for i in range(4):
        server.pages[f"/{i}"] = redirect(f"/{i + 1}")
    server.pages["/4"] = page(IMAGE)
    with pytest.raises(FetchError, match="too often"):
        await fetch(server, "/0")
    assert await fetch(server, "/1") == IMAGE
    server.pages["/circle"] = redirect("/circle")
    with pytest.raises(FetchError, match="too often"):
        await fetch(server, "/circle")


@pytest.mark.parametrize(
    "location",
    ["http://pictures.example:{port}/a.png", "http://127.0.0.1:{port}/a.png", "file:///etc/passwd",
     "https://inner.example:{port}/a.png", "https://10.0.0.1:{port}/", "https://[::1]:{port}/",
     "//inner.example:{port}/a.png", "https://user@pictures.example:{port}/a.png", "",
     "https://pictures.example:{port}\\@inner.example/", "\\\\inner.example\\a.png",
     "https://pictures.example/a.png", "ftp://pictures.example/a.png", "data:image/png;base64,AAAA",
     "javascript:1", "https://pictures.example:{port}/\u00e9"],
)  # fmt: skip
async def test_redirect_target_is_checked_like_url(server: TlsServer, location: str) -> None:
    server.pages["/1"] = redirect(location.format(port=server.port))
    resolver = Resolver({"inner.example": ["10.0.0.1"], "10.0.0.1": ["10.0.0.1"], "::1": ["::1"]})
    with pytest.raises(FetchError, match=r"URL|public address|port|too often"):
        await fetcher(server, resolver).fetch(url(server, "/1"), LIMIT)


async def test_redirect_cannot_leave_named_hosts(server: TlsServer) -> None:
    server.pages["/1"] = redirect(url(server, host="other.example"))
    with pytest.raises(FetchError, match=r"urls\.https_hosts"):
        await fetcher(server, None, "pictures.example").fetch(url(server, "/1"), LIMIT)


async def test_fetch_sends_no_cookies(server: TlsServer) -> None:
    server.pages["/1"] = page(b"", "Location: /a.png", "Set-Cookie: a=b", status="302 Found")
    assert await fetch(server, "/1") == IMAGE
    assert "cookie" not in server.asked[1].lower()


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x" * 4096)
        await writer.drain()


async def endless_chunks(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"5\r\nhello\r\n" * 100)
        await writer.drain()


async def endless_headers(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"X: y\r\n" * 1000)
        await writer.drain()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (endless, TooLarge),
        (endless_chunks, TooLarge),
        (endless_headers, FetchError),
        (page(b"x" * (LIMIT + 1)), TooLarge),
        (page(IMAGE, length=LIMIT + 1), TooLarge),
        (page(IMAGE, length=10**30), FetchError),
        (page(IMAGE, length=len(IMAGE) + 1), FetchError),
        (page(IMAGE, length=-1), FetchError),
        (page(IMAGE, "Content-Length: 5"), FetchError),
        (page(IMAGE, "Content-Encoding: gzip"), FetchError),
        (page(IMAGE, "Transfer-Encoding: gzip, chunked"), FetchError),
        (page(IMAGE, status="404 Not Found"), FetchError),
        (page(IMAGE, status="206 Partial Content"), FetchError),
        (page(IMAGE, status="500 Sorry"), FetchError),
        (page(IMAGE, status="300 Choices"), FetchError),
        (b"", FetchError),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", FetchError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", FetchError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel", FetchError),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 5, FetchError),
    ],
)
async def test_fetch_refuses_hostile_responses(
    server: TlsServer, answer: bytes, error: type[Exception]
) -> None:
    server.pages["/a.png"] = answer
    async with asyncio.timeout(10):
        with pytest.raises(error):
            await fetch(server, "/a.png")


async def test_fetch_ends_at_declared_length(server: TlsServer) -> None:
    server.pages["/a.png"] = page(IMAGE, length=100)
    assert await fetch(server, "/a.png") == IMAGE[:100]


async def test_fetch_accepts_body_of_exactly_byte_limit(server: TlsServer) -> None:
    server.pages["/a.png"] = page(b"x" * LIMIT)
    assert len(await fetch(server, "/a.png")) == LIMIT


async def test_cancelled_fetch_leaves_no_connection(server: TlsServer) -> None:
    is_open, is_closed = asyncio.Event(), asyncio.Event()

    async def trickle(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        is_open.set()
        try:
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.02)
        finally:
            is_closed.set()

    server.pages["/a.png"] = trickle
    fetching = asyncio.create_task(fetch(server, "/a.png"))
    async with asyncio.timeout(10):
        await is_open.wait()
        fetching.cancel()
        await asyncio.wait([fetching])
        await is_closed.wait()
    assert fetching.cancelled()
