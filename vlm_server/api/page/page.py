"""`GET /`: the page for browsers, plain text for other clients; and the files of the page.

The files are read once and are public: their scripts call the API with the user's key. Scripts,
styles and requests involve this server alone: see `content_security_policy`. The page names its
files below a folder that changes with their content, so that a browser asks for each only once.
What its first paint needs is in the page itself: the styles of its head, and the script that starts
it, both allowed by their hashes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from vlm_server.api.http.access.gate import wants_html
from vlm_server.errors import NotFound


def content_security_policy(index: bytes) -> str:
    """The policy of the page whose HTML is `index`, and of its files."""
    script, style = (
        " ".join(["'self'", *(_hash(text) for text in re.findall(pattern, index, re.DOTALL))])
        for pattern in (rb"<script>(.*?)</script>", rb"<style>(.*?)</style>")
    )
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {script}",
            f"style-src {style}",
            "img-src 'self' blob: data:",
            "media-src blob:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def _hash(text: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"


_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), display-capture=(self), microphone=(), geolocation=()",
    "Vary": "Accept, Accept-Encoding",
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}
_GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(?:\.0*)?\s*(?:,|$))")
_REVALIDATED = "no-cache"  # cached, and asked for again by the ETag
_KEPT = "public, max-age=31536000, immutable"
_INDEX = "index.html"
_STATIC = Path(__file__).with_name("static")


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page; `etag` changes with its content."""

    content: bytes
    media_type: str
    etag: str


def read_files() -> dict[str, PageFile]:
    """The files of the page, by their path in its folder."""
    paths = sorted(path for path in _STATIC.rglob("*") if path.suffix in _TYPES)
    return {path.relative_to(_STATIC).as_posix(): _read(path) for path in paths}


class StartPage:
    """The two endpoints. `plain` answers clients that do not ask for HTML."""

    def __init__(self, plain: Callable[[Request], Awaitable[Response]]) -> None:
        self._files = read_files()
        self._version = version_of(self._files)
        self._index = assemble(self._files, self._version)
        self._policy = content_security_policy(self._index.content)
        self._plain = plain

    async def show(self, request: Request) -> Response:
        if wants_html(request.headers):
            return self._answer(request, self._index, _REVALIDATED)
        response = await self._plain(request)
        response.headers["Vary"] = "Accept"
        return response

    async def file(self, request: Request) -> Response:
        """A file of the page. Raises NotFound, also for a page of another version."""
        name = request.path_params["name"]
        file = self._files.get(name.removeprefix(self._version))
        if file is None:
            raise NotFound("The page has no such file.")
        caching = _KEPT if name.startswith(self._version) else _REVALIDATED
        return self._answer(request, file, caching)

    def _answer(self, request: Request, file: PageFile, caching: str) -> Response:
        headers, content = {**_HEADERS, "ETag": file.etag, "Cache-Control": caching}, file.content
        headers["Content-Security-Policy"] = self._policy
        takes_gzip = _GZIP.search(request.headers.get("accept-encoding", ""))
        if takes_gzip and file.media_type != "image/png":
            headers |= {"ETag": f'{file.etag[:-1]}-gzip"', "Content-Encoding": "gzip"}
            content = _compressed(content)
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=file.media_type)


def version_of(files: dict[str, PageFile]) -> str:
    """The folder of these `files`, as in `v-0123456789abcdef/`."""
    etags = "".join(f"{name}{file.etag}" for name, file in files.items())
    return f"v-{hashlib.sha256(etags.encode()).hexdigest()[:16]}/"


def assemble(files: dict[str, PageFile], version: str) -> PageFile:
    """The page: its index with the style sheets of its head in it, and its files in `version`."""
    index = files[_INDEX]
    head, mark, body = index.content.partition(b"</head>")
    styles: list[bytes] = []

    def take(match: re.Match[bytes]) -> bytes:
        styles.append(files[match[1].decode()].content)
        return b""

    head = re.sub(rb'<link rel="stylesheet" href="page/([\w.]+)">\n', take, head)
    content = head + b"<style>\n" + b"".join(styles) + b"</style>\n" + mark + body
    named = re.sub(
        rb'((?:src=|href=|import\()"(?:\./)?page/)', rb"\g<1>" + version.encode(), content
    )
    return _page_file(named, index.media_type)


def _read(path: Path) -> PageFile:
    return _page_file(path.read_bytes(), _TYPES[path.suffix])


def _page_file(content: bytes, media_type: str) -> PageFile:
    return PageFile(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


@cache
def _compressed(content: bytes) -> bytes:
    """`content`, that of a file of the page: compressed once, when it is first asked for."""
    return gzip.compress(content, mtime=0)
