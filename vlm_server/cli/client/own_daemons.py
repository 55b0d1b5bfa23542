"""The daemons of this user: each keeps a file with its address while it runs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import httpx

from vlm_server.settings.paths import state_folder

_ANSWER_SECONDS = 1.0
_MOST = 8
"""Daemons that are asked whether they are there, the newest first."""


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
    """The addresses of this user's daemons that answer, but for `url`."""
    urls = []
    with contextlib.suppress(OSError):
        files = [file for file in _folder().iterdir() if _is_alive(file)]
        newest = sorted(files, key=os.path.getmtime, reverse=True)[:_MOST]
        urls = [file.read_text(encoding="utf-8", errors="replace") for file in newest]
    return [other for other in urls if other != url and _answers(other)]


def _folder() -> Path:
    return state_folder() / "daemons"


def _is_alive(file: Path) -> bool:
    """Whether the process of `file` is there; else, the file is removed."""
    try:
        os.kill(int(file.name), 0)
    except ProcessLookupError:  # it was killed
        file.unlink(missing_ok=True)
        return False
    except (ValueError, OSError):
        return False
    return True


def _answers(url: str) -> bool:
    try:
        live = f"{url.removesuffix('/v1')}/health/live"
        return httpx.get(live, timeout=_ANSWER_SECONDS, trust_env=False).is_success
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
