"""Locks a folder that several processes change, and tells each that another has changed it.

The file `lock` in the folder is locked (`flock`) for a turn: milliseconds, in which files appear or
are evicted. It holds a token, which is another one after each turn. A token of zeros, or none, says
that a turn is being taken, or that a process died in one: nobody knows what it changed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_TOKEN_BYTES = 16
_NONE = "00" * _TOKEN_BYTES
_WAIT_SECONDS = 10.0
"""For one's turn. Whoever has one for longer hangs, or does not share the folder."""
_PAUSE_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens before and after it; `before` is empty if what was changed is not known."""

    before: str
    after: str


class FolderLock:
    """Of all threads and processes that have one for the same folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"

    @property
    def token(self) -> str:
        """Empty if what was changed is not known. Raises OSError."""
        try:
            held = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return ""
        try:
            return _token(held)
        finally:
            os.close(held)

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Raises OSError, TimeoutError among them, if this thread can't have one."""
        held = self._locked()
        try:
            turn = Turn(_token(held), secrets.token_hex(_TOKEN_BYTES))
            _write(held, _NONE)
            try:
                yield turn
            finally:
                _write(held, turn.after)
        finally:
            os.close(held)

    def _locked(self) -> int:
        """The file, locked until the descriptor that this returns is closed."""
        give_up_at = time.monotonic() + _WAIT_SECONDS
        while True:
            held = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_there(held):
                    return held
            except BlockingIOError:
                pass
            except BaseException:
                os.close(held)
                raise
            os.close(held)
            if time.monotonic() > give_up_at:
                raise TimeoutError(errno.ETIMEDOUT, "another process keeps it locked", self._path)
            time.sleep(_PAUSE_SECONDS)

    def _is_there(self, held: int) -> bool:
        """Whether the file was not removed since it was opened."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self._path), os.fstat(held))
        return False


def _token(held: int) -> str:
    token = os.pread(held, len(_NONE), 0).decode("ascii", "replace")
    return "" if token == _NONE else token


def _write(held: int, token: str) -> None:
    """In place: a full disk has room for it, but for file systems that copy what is written. What
    can't be written there costs everyone a look at the folder."""
    with suppress(OSError):
        os.pwrite(held, token.encode(), 0)
