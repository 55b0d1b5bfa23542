"""The fetching of clients' `https:` URLs, from public addresses only.

Each host's addresses are checked, and the connection goes to a checked address, even if the name
resolves to another by then. Certificates are verified for the name. Redirects are followed by the
same rules. Knows nothing of images. Runs in a process that can be killed: see `media_url_child`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import urljoin

import httpx

from vlm_server.api.http.urls import public_address

MAX_REDIRECTS = 3
MAX_URL_CHARS = 4096
_MAX_ADDRESSES = 4
_TIMEOUT = httpx.Timeout(None, connect=5.0).as_dict()
_REDIRECT_STATUSES = frozenset({301, 302, 303, 307, 308})
_HEADERS = {"User-Agent": "vlm-server", "Accept-Encoding": "identity", "Connection": "close"}
_URL = re.compile(
    r"https://(?P<host>[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<target>(?:[/?][!-\[\]-~]*)?)",  # printable ASCII but for the backslash
    re.IGNORECASE | re.ASCII,
)
"""The form of accepted URLs, so strict that no two parsers read one differently."""

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a host, for a port. Raises OSError."""


class FetchError(Exception):
    """A URL can't be fetched; the message ends a sentence and shows nothing of the URL."""


class TooLarge(Exception):
    """A response has more bytes than allowed."""


async def resolve(host: str, port: int) -> list[str]:
    """The addresses that this machine's resolver gives. Raises OSError."""
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in addresses))


def default_context() -> ssl.SSLContext:
    """A context that verifies certificates by certifi's authorities."""
    return httpx.create_ssl_context(trust_env=False)


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a URL: `host` without brackets, `path` with the query."""

    host: str
    path: bytes

    def authority(self, port: int) -> str:
        """The value of the Host header."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if port == 443 else f"{name}:{port}"


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Fetches from `hosts` (names, `*.` and the end of a name, or `*`) at `port`."""

    hosts: tuple[str, ...]
    port: int = 443
    resolve: Resolve = resolve
    is_allowed: Callable[[str], bool] = public_address.is_public
    context: ssl.SSLContext = field(default_factory=default_context)

    async def fetch(self, url: str, max_bytes: int) -> bytes:
        """The bytes at `url`. Has no time limit of its own. Raises FetchError or TooLarge."""
        async with self.opened(url) as response:
            return await _read(response, max_bytes)

    @contextlib.asynccontextmanager
    async def opened(self, url: str) -> AsyncIterator[httpx.Response]:
        """The response at `url`, after redirects, its body not read. Raises FetchError."""
        for _ in range(MAX_REDIRECTS + 1):
            async with self._get(url) as response:
                if response.status_code not in _REDIRECT_STATUSES:
                    _check(response)
                    yield response
                    return
                url = urljoin(url, response.headers.get("location", ""))
        raise FetchError("is redirected too often")

    @contextlib.asynccontextmanager
    async def _get(self, url: str) -> AsyncIterator[httpx.Response]:
        """The response to a GET, its body not read. Raises FetchError, also in the block."""
        target = self._parse(url)
        addresses = await self._addresses(target.host)
        transport = httpx.AsyncHTTPTransport(verify=self.context, trust_env=False)
        try:
            async with transport:
                response = await self._ask(transport, addresses, target)
                async with contextlib.aclosing(response):
                    yield response
        except httpx.HTTPError:
            raise FetchError("broke off, or the server does not keep to HTTP") from None

    async def _ask(
        self, transport: httpx.AsyncHTTPTransport, addresses: list[str], target: Target
    ) -> httpx.Response:
        """The response of the first reachable one of `addresses`."""
        for address in addresses:
            request = httpx.Request(
                "GET",
                httpx.URL(scheme="https", host=address, port=self.port, raw_path=target.path),
                headers={"Host": target.authority(self.port), **_HEADERS},
                extensions={"sni_hostname": target.host, "timeout": _TIMEOUT},
            )
            with contextlib.suppress(httpx.ConnectError, httpx.ConnectTimeout):
                return await transport.handle_async_request(request)
        raise FetchError("is at a host that can't be reached, or has no valid certificate")

    def _parse(self, url: str) -> Target:
        """The parts of `url`. Raises FetchError for another form, port or host."""
        match = _URL.fullmatch(url.partition("#")[0]) if len(url) <= MAX_URL_CHARS else None
        if match is None:
            raise FetchError("is not at a plain `https:` URL")
        if int(match["port"] or 443) != self.port:
            raise FetchError("is not at the usual port of `https:`")
        host = match["host"].lower().strip("[]").removesuffix(".")
        if not any(_matches(host, pattern.lower()) for pattern in self.hosts):
            raise FetchError("is at a host that `urls.https_hosts` does not name")
        path = match["target"]
        return Target(host, (path if path.startswith("/") else f"/{path}").encode())

    async def _addresses(self, host: str) -> list[str]:
        """The addresses of `host`, which must all be allowed. Raises FetchError."""
        try:
            addresses = await self.resolve(host, self.port)
        except (OSError, UnicodeError):
            addresses = []
        if not addresses or not all(map(self.is_allowed, addresses)):
            raise FetchError("is at a host without a public address")  # also for no address
        return addresses[:_MAX_ADDRESSES]


def _check(response: httpx.Response) -> None:
    """Raises FetchError for a response without the bytes themselves."""
    if response.status_code != 200:
        raise FetchError(f"was not sent: the status of the answer is {response.status_code}")
    if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise FetchError("was sent compressed")


async def _read(response: httpx.Response, max_bytes: int) -> bytes:
    declared = response.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise TooLarge
    data = bytearray()
    assert isinstance(response.stream, httpx.AsyncByteStream)
    async for received in response.stream:
        data += received
        if len(data) > max_bytes:
            raise TooLarge
    return bytes(data)


def _matches(host: str, pattern: str) -> bool:
    if pattern.startswith("*"):
        return host.endswith(pattern[1:])
    return host == pattern
