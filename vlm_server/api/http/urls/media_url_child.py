"""The process that reads the `https:` and `file:` URLs of one request at a time.

It keeps DNS, TLS and HTTP with foreign servers out of the front. Started by `media_urls`.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

import msgspec

from vlm_server.api.http.urls import fetch
from vlm_server.api.http.urls.fetch import Fetcher, FetchError, TooLarge
from vlm_server.api.outcomes import serve_outcomes
from vlm_server.api.parsing.media.external import Contents, MediaUrl, UrlJob
from vlm_server.errors import PayloadTooLarge, RequestError
from vlm_server.platform.child.serve import ChildLimits
from vlm_server.settings.paths import expand_home

MAX_CONNECTIONS = 8
"""The most connections of one job."""
_MAX_LOOKUPS = 4
_CPU_SECONDS = 5.0


class Reader:
    """Reads the URLs of one job. Raises RequestError."""

    def __init__(self, job: UrlJob, fetcher: Fetcher) -> None:
        self._job = job
        self._fetcher = fetcher
        self._roots = [expand_home(root) for root in job.roots]
        self._turns = asyncio.Semaphore(MAX_CONNECTIONS)
        self._left_bytes = job.max_total_bytes
        self._unread = dict.fromkeys(job.urls)

    async def read(self) -> tuple[bytes, ...]:
        """The bytes of all URLs, or the first error."""
        try:
            async with asyncio.timeout(self._job.seconds), asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._read(url)) for url in self._job.urls]
        except TimeoutError:
            url = next(iter(self._unread))
            raise url.refusal(f"did not arrive within {self._job.seconds:g} seconds") from None
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return tuple(task.result() for task in tasks)

    async def _read(self, url: MediaUrl) -> bytes:
        async with self._turns:
            max_bytes = min(url.max_bytes, self._left_bytes)
            try:
                data = await self._bytes_of(url, max_bytes)
            except FetchError as error:
                raise url.refusal(str(error)) from None
            except NotReadable:
                raise url.refusal("is no file that `urls.file_folders` lets clients read") from None
            except TooLarge:
                raise url.too_large() if max_bytes == url.max_bytes else self._too_many() from None
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise self._too_many()
        del self._unread[url]
        return data

    async def _bytes_of(self, url: MediaUrl, max_bytes: int) -> bytes:
        if url.is_file:
            return read(url.url, self._roots, max_bytes)
        return await self._fetcher.fetch(url.url, max_bytes)

    def _too_many(self) -> RequestError:
        limit = self._job.max_total_bytes
        return PayloadTooLarge(
            f"The URLs of the request hold more than {limit} bytes together "
            "(limits.max_body_bytes)."
        )


def main(memory_bytes: int, fetcher_of: Callable[[UrlJob], Fetcher]) -> None:
    """Answer jobs from standard input, with the fetcher that `fetcher_of` makes for each."""
    runner = asyncio.Runner()

    def work(job_bytes: bytearray) -> Contents:
        job = msgspec.msgpack.decode(job_bytes, type=UrlJob)
        # New threads: those of the previous job may still wait for a name server.
        runner.get_loop().set_default_executor(ThreadPoolExecutor(_MAX_LOOKUPS))
        return Contents(runner.run(Reader(job, fetcher_of(job)).read()))

    serve_outcomes(work, ChildLimits(memory_bytes, _CPU_SECONDS, memory_bytes // 4))


# ---- file URLs ---------------------------------------------------------------------------


_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class NotReadable(Exception):
    """The URL names no file that may be read."""


def read(url: str, roots: Sequence[Path], max_bytes: int) -> bytes:
    """The bytes of a regular file below one of `roots`, which are absolute.

    Links must stay below the same root. Raises NotReadable or TooLarge.
    """
    path = _path(url)
    for root in roots:
        if root in path.parents:
            try:
                return _read(root, path, max_bytes)
            except OSError:
                raise NotReadable from None
    raise NotReadable


def _path(url: str) -> Path:
    """The absolute path that `url` names, without `..`."""
    try:
        parts = urlsplit(url)
        path = os.fsdecode(unquote_to_bytes(parts.path))
    except ValueError:
        raise NotReadable from None
    is_plain = parts.scheme == "file" and parts.netloc.lower() in ("", "localhost")
    if not is_plain or parts.query or parts.fragment:
        raise NotReadable
    if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise NotReadable
    return Path("/" + path.lstrip("/"))


def _read(root: Path, path: Path, max_bytes: int) -> bytes:
    """The bytes of the file. Raises OSError, NotReadable or TooLarge."""
    real_root = Path(os.path.realpath(root, strict=True))
    real_path = Path(os.path.realpath(path, strict=True))
    if real_root not in real_path.parents:
        raise NotReadable
    descriptor = _open_below(real_root, real_path.relative_to(real_root).parts)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotReadable
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise TooLarge
    return data


def _open_below(root: Path, parts: Sequence[str]) -> int:
    """A descriptor of the file, opened folder by folder without following a link. Raises OSError.

    A folder replaced by a link after the path was resolved is an error.
    """
    folder = os.open(root, _OPEN | os.O_DIRECTORY)
    try:
        for name in parts[:-1]:
            inner = os.open(name, _OPEN | os.O_DIRECTORY, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(parts[-1], _OPEN, dir_fd=folder)
    finally:
        os.close(folder)


if __name__ == "__main__":
    CONTEXT = fetch.default_context()
    main(int(sys.argv[1]), lambda job: Fetcher(job.hosts, context=CONTEXT))
