"""The daemons of this user: each keeps a file with its address while it runs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from vlm_server.settings.paths import state_folder

_ANSWER_SECONDS = 1.0
"""Time for all to answer."""
_MOST = 8
"""Daemons that are asked whether they are there, the newest first."""


class _Entry(NamedTuple):
    is_alive: bool
    """Whether there is a process with its number, which may be in another PID namespace."""
    modified_seconds: float
    file: Path
    url: str


@contextlib.contextmanager
def listed(url: str) -> Iterator[None]:
    """Name this process as a daemon at `url`, if there is a place for that."""
    file = _folder() / str(os.getpid())
    with contextlib.suppress(OSError):
        if file.is_absolute():  # else nobody knows a home for this user
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.write_text(url, encoding="utf-8")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            file.unlink()


def others_than(url: str) -> list[str]:
    """The addresses of this user's daemons that answer in time, but for `url`.

    The files of daemons that were killed are removed.
    """
    entries = _entries()
    urls = list(dict.fromkeys(entry.url for entry in entries))
    answering = _answering(urls)
    for entry in entries:
        if not entry.is_alive and entry.url not in answering:
            with contextlib.suppress(OSError):
                entry.file.unlink()
    return [other for other in urls if other != url and other in answering]


def is_live(response: httpx.Response) -> bool:
    """Whether a daemon answered this to `/health/live`, not another program. Raises ValueError."""
    return response.is_success and bool(response.json() == {"status": "live"})


def _folder() -> Path:
    return state_folder() / "daemons"


def _entries() -> list[_Entry]:
    """What the newest files say, those of living processes first."""
    entries = []
    with contextlib.suppress(OSError):
        for file in _folder().iterdir():
            with contextlib.suppress(OSError, ValueError, OverflowError):  # gone, or none of ours
                is_alive, url = _is_alive(int(file.name)), file.read_text(encoding="utf-8")
                entries.append(_Entry(is_alive, file.stat().st_mtime, file, url))
    return sorted(entries, reverse=True)[:_MOST]


def _is_alive(pid: int) -> bool:
    """Whether there is a process of this user. Raises OverflowError if none has such a number."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _answering(urls: Sequence[str]) -> set[str]:
    """Those of `urls` that answer in time."""
    answering = set[str]()

    def ask(url: str) -> None:
        with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL, ValueError):
            live = f"{url.removesuffix('/v1')}/health/live"
            if is_live(httpx.get(live, timeout=_ANSWER_SECONDS, trust_env=False)):
                answering.add(url)

    threads = [threading.Thread(target=ask, args=(url,), daemon=True) for url in urls]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _ANSWER_SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return answering.copy()  # which late ones no longer change
