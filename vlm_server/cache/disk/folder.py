"""A folder of files that several processes change: its lock, its index, and eviction.

The file `lock` in the folder is locked (`flock`) for a turn: milliseconds, in which files appear or
are evicted. It holds a token that changes with each turn, so a process sees whether others changed
the folder. A token of zeros, or none, says that a turn is under way, or that a process died in one:
what it changed is unknown.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from vlm_server.cache.disk.files import FileIndex, StoredFile, list_names, look_at

logger = logging.getLogger(__name__)

_GONE = frozenset({errno.ENOENT, errno.ESTALE})
"""ESTALE: another machine deleted it, on a network file system."""
_REFRESH_WAIT_SECONDS = 0.05
"""How long a look-up waits for whoever changes the folder, before it uses the old index."""
_LATE_SECONDS = 60.0
"""How long a network file system may keep an old listing (Linux: `acdirmax`)."""
_TOKEN_BYTES = 16
_NO_TOKEN = "00" * _TOKEN_BYTES
_TURN_WAIT_SECONDS = 10.0
"""Who has a turn for longer hangs, or does not share the folder."""
_TURN_PAUSE_SECONDS = 0.005


def is_gone(error: BaseException) -> bool:
    """Whether the error says that the file was deleted, by another process or a person."""
    return isinstance(error, OSError) and error.errno in _GONE


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens before and after a turn; `before` is empty if earlier changes are unknown."""

    before: str
    after: str


class FolderLock:
    """The lock that all threads and processes with the same folder share."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"

    @property
    def token(self) -> str:
        """The token in the file; empty if earlier changes are unknown. Raises OSError."""
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
        """The lock, for the `with` block. Raises OSError, such as TimeoutError."""
        held = self._locked()
        try:
            turn = Turn(_token(held), secrets.token_hex(_TOKEN_BYTES))
            _write_token(held, _NO_TOKEN)
            try:
                yield turn
            finally:
                _write_token(held, turn.after)
        finally:
            os.close(held)

    def _locked(self) -> int:
        give_up_at = time.monotonic() + _TURN_WAIT_SECONDS
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
            time.sleep(_TURN_PAUSE_SECONDS)

    def _is_there(self, held: int) -> bool:
        """Whether the file was not removed since it was opened."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self._path), os.fstat(held))
        return False


def _token(held: int) -> str:
    token = os.pread(held, len(_NO_TOKEN), 0).decode("ascii", "replace")
    return "" if token == _NO_TOKEN else token


def _write_token(held: int, token: str) -> None:
    """In place, so that a full disk has room for it. If that fails, as on a full copy-on-write file
    system, every process lists the folder again."""
    with suppress(OSError):
        os.pwrite(held, token.encode(), 0)


class SharedFolder:
    """This process's index of all owners' files. Thread-safe.

    Up to date after `refresh`, and in a `turn`; in between, files may be gone, which is no error.
    The folder is listed, and files are deleted, without the lock that look-ups need.
    """

    def __init__(self, root: Path) -> None:
        """Raises OSError if the folder can't be used."""
        self.root = root
        self._folder_lock = FolderLock(root)
        self._changing = threading.Lock()
        """Held while the index is compared with the folder, or both are changed; before `_lock`."""
        self._lock = threading.Lock()
        self._deleted = threading.Condition(self._lock)
        self._index = FileIndex()
        self._leaving: set[str] = set()
        """Names of files that are being deleted and are no longer in the index."""
        self._found: list[StoredFile] = []
        self._gone: list[StoredFile] = []
        """Changes by others, until `take_found` and `take_gone`."""
        self._seen, self._list_again_at = "", float("inf")
        """The token of the last listing, and when to list again in case that one was old."""
        self._last_use = self._evictions = 0
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._catch_up(self._folder_lock.token)

    # ---- what is known -------------------------------------------------------------------

    def find(self, owner: str, key: str) -> StoredFile | None:
        with self._lock:
            return self._index.find(owner, key)

    def files_of(self, owner: str) -> list[StoredFile]:
        """All files of an owner."""
        with self._lock:
            return self._index.files_of(owner)

    @property
    def files(self) -> list[StoredFile]:
        """The files of all owners."""
        with self._lock:
            return list(self._index)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Files, their bytes, and how many were evicted by this process."""
        with self._lock:
            return len(self._index), self._index.size_bytes, self._evictions

    def path(self, file: StoredFile) -> Path:
        return self.root / file.owner / file.name

    def take_found(self, owner: str) -> list[str]:
        """Keys of what other processes have stored since the last call."""
        with self._lock:
            found, self._found = self._found, []
        return [file.key for file in found if file.owner == owner]

    def take_gone(self, owner: str) -> list[str]:
        """Keys of what was evicted, or deleted by others, since the last call."""
        with self._lock:
            gone, self._gone = self._gone, []
        return [file.key for file in gone if file.owner == owner]

    # ---- with other processes ------------------------------------------------------------

    def refresh(self) -> None:
        """Index what others changed; if nothing, that costs reading one small file.

        Does nothing while the folder is being changed, or if it can't be listed.
        """
        if not self._changing.acquire(timeout=_REFRESH_WAIT_SECONDS):
            return
        try:
            self._catch_up(self._folder_lock.token)
        except OSError:
            logger.debug("the folder of the disk cache can't be listed", exc_info=True)
        finally:
            self._changing.release()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A turn to change the folder, with an index that is up to date.

        Makes the folder again if it was removed. Raises OSError.
        """
        with self._changing:
            if not self.root.exists():
                self.root.mkdir(mode=0o700, parents=True)
                logger.warning(
                    "the folder of the disk cache was removed, and is made again: %s", self.root
                )
            with self._folder_lock.turn() as turn:
                self._catch_up(turn.before)
                self._seen = turn.after
                yield

    def _catch_up(self, token: str) -> None:
        """Compare the index with the folder, unless nobody changed it. Needs `_changing`."""
        now = time.monotonic()
        if token and token == self._seen and now < self._list_again_at:
            return
        there = list_names(self.root)
        with self._lock:
            new, gone = self._index.compare(there)
            new = [(owner, name) for owner, name in new if name not in self._leaving]
        seen = (look_at(self.root, owner, name) for owner, name in new)
        found = [file for file in seen if file is not None]
        with self._lock:
            self._gone += [file for file in gone if self._index.remove(file)]
            for file in found:
                self._index.add(file)
                self._last_use = max(self._last_use, file.used_ns)
            self._found += found
        self._list_again_at = now + _LATE_SECONDS if token != self._seen else float("inf")
        self._seen = token

    # ---- changes ---------------------------------------------------------------------

    def rename(self, temporary: Path, owner: str, name: str, size_bytes: int) -> None:
        """Give a written file its name. Needs a turn; raises OSError."""
        with self._lock:
            self._deleted.wait_for(lambda: name not in self._leaving)
            file = StoredFile(self._next_use(), owner, name, size_bytes)
        os.utime(temporary, ns=(file.used_ns, file.used_ns))
        temporary.rename(self.path(file))
        with self._lock:
            self._index.add(file)

    def touch(self, owner: str, key: str) -> None:
        """Record a use of a file, for all processes."""
        with self._lock:
            known = self._index.find(owner, key)
            if known is None:
                return
            file = known._replace(used_ns=self._next_use())
            self._index.add(file)
        with suppress(OSError):
            os.utime(self.path(file), ns=(file.used_ns, file.used_ns))

    def evict_to(self, most_bytes: int, keep: Collection[str] = ()) -> None:
        """Delete the least recently used files, by any process, down to `most_bytes`.

        Names in `keep` stay. Needs a turn; raises OSError for a file that can't be deleted.
        """
        while True:
            with self._lock:
                file = self._index.oldest(keep)
                if file is None or self._index.size_bytes <= most_bytes:
                    return
            there = look_at(self.root, file.owner, file.name)
            if there is not None and there.used_ns > file.used_ns:  # another process used it
                with self._lock:
                    if self._index.remove(file):
                        self._index.add(there)
                continue
            if self.delete(file):
                with self._lock:
                    self._gone.append(file)
                    self._evictions += there is not None

    def delete(self, file: StoredFile) -> bool:
        """Delete a file; returns whether it was known. Raises OSError, and knows it again then."""
        with self._lock:
            if not self._index.remove(file):
                return False
            self._leaving.add(file.name)
        try:
            self.path(file).unlink(missing_ok=True)
        except OSError:
            with self._lock:
                self._index.add(file)
            raise
        finally:
            with self._lock:
                self._leaving.discard(file.name)
                self._deleted.notify_all()
        return True

    def forget(self, file: StoredFile) -> None:
        """Drop `file` from the index: it is gone."""
        with self._lock:
            self._index.remove(file)

    def _next_use(self) -> int:
        """The time in ns, but later than all earlier uses, even by a clock that was ahead: else new
        files would be evicted before those. Needs the lock."""
        self._last_use = max(self._last_use + 1, time.time_ns())
        return self._last_use
