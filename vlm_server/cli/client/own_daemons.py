"""The daemons of this user: each keeps a file with its address, and locks it while it runs.

A process that is no daemon may get a dead one's number, and another user may get its port: the lock
tells that it lives. The number has to be there as well, as a home may be of several machines.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import httpx

from vlm_server.settings.paths import state_folder

_ANSWER_SECONDS = 1.0
"""Time for all to answer."""
_LOCK_ATTEMPTS, _LOCK_SECONDS = 5, 0.02
_MOST = 8
"""Daemons that are asked whether they are there, the newest first."""


class _Entry(NamedTuple):
    is_alive: bool
    """Whether it surely runs here; one in another PID namespace may run as well."""
    modified_seconds: float
    file: Path
    url: str


@contextlib.contextmanager
def listed(url: str) -> Iterator[None]:
    """Name this process as a daemon at `url`, if there is a place for that.

    There is none if a daemon in another container has the same number and the same folder.
    """
    file = _folder() / str(os.getpid())
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            if file.is_absolute():  # else nobody knows a home for this user
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                opened = stack.enter_context(file.open("a", encoding="utf-8"))
                _lock(opened)
                stack.callback(_remove, file)
                opened.truncate(0)
                opened.write(url)
                opened.flush()
        yield


def _lock(opened: IO[str]) -> None:
    """Lock a file, if its file system has locks. Raises BlockingIOError if another daemon has it.

    Who only looks whether it is locked holds it for a moment.
    """
    for attempt in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt + 1 == _LOCK_ATTEMPTS:
                raise
            time.sleep(_LOCK_SECONDS)
        except OSError:
            return
        else:
            return


def running() -> list[str]:
    """The addresses of this user's daemons that surely run here and answer, the newest first."""
    return _answering(entry.url for entry in _entries() if entry.is_alive)


def others_than(url: str) -> list[str]:
    """The addresses, but for `url`, at which daemons answer that are or were of this user.

    Those that `running` does not have may be another's. The files of daemons that were killed are
    removed.
    """
    entries = _entries()
    answering = _answering(entry.url for entry in entries)
    for entry in entries:
        if not entry.is_alive and entry.url not in answering:
            _remove(entry.file)
    return [other for other in answering if other != url]


def is_live(response: httpx.Response) -> bool:
    """Whether a daemon answered this to `/health/live`, not another program. Raises ValueError."""
    return response.is_success and bool(response.json() == {"status": "live"})


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


def _folder() -> Path:
    return state_folder() / "daemons"


def _entries() -> list[_Entry]:
    """What the newest files say, those of living daemons first."""
    entries = []
    with contextlib.suppress(OSError):
        for file in _folder().iterdir():
            with contextlib.suppress(OSError, ValueError, OverflowError):  # gone, or none of ours
                url = file.read_text(encoding="utf-8")
                is_alive = _is_process(int(file.name)) and _is_locked(file)
                entries.append(_Entry(is_alive, file.stat().st_mtime, file, url))
    return sorted(entries, reverse=True)[:_MOST]


def _is_process(pid: int) -> bool:
    """Whether there is a process of this user. Raises OverflowError if none has such a number."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _is_locked(file: Path) -> bool:
    """Whether its daemon holds the lock on `file`, as far as one can know. Raises OSError."""
    with file.open("rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)  # as readers do not exclude another
        except OSError:  # or there are no locks here
            return True
    return False


def _answering(named: Iterable[str]) -> list[str]:
    """Those of `named` that answer in time, each once."""
    urls, answering = list(dict.fromkeys(named)), set[str]()

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
    told = answering.copy()  # which late ones no longer change
    return [url for url in urls if url in told]
