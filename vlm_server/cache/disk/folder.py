"""A folder of files that several processes change: its lock, its index, and eviction.

The file `lock` in the folder is locked (`flock`) for a turn: milliseconds in which files appear or
are evicted. It holds a token that changes with each turn and shows whether another process has
changed the folder. A token of zeros, or none, shows that a turn is under way, or that a process
died in one: its changes are unknown.
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

from vlm_server.cache.disk.files import FileIndex, StoredFile, list_names, read_entry

logger = logging.getLogger(__name__)

_GONE = frozenset({errno.ENOENT, errno.ESTALE})
"""ESTALE: another machine deleted the file, on a network file system."""
_REFRESH_WAIT_SECONDS = 0.05
"""The maximum wait of a look-up for a change of the folder, before it uses the old index."""
_LATE_SECONDS = 60.0
"""The maximum age of a network file system's listing (Linux: `acdirmax`)."""
_TOKEN_BYTES = 16
_NO_TOKEN = "00" * _TOKEN_BYTES
_TURN_WAIT_SECONDS = 10.0
"""A process whose turn takes longer hangs, or its lock does not work."""
_TURN_PAUSE_SECONDS = 0.005


def is_gone(error: BaseException) -> bool:
    """Whether the error means that the file was deleted, by another process or a person."""
    return isinstance(error, OSError) and error.errno in _GONE


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens before and after a turn; `before` is empty if earlier changes are unknown."""

    before: str
    after: str


class FolderLock:
    """The lock shared by all threads and processes that use the folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"

    @property
    def token(self) -> str:
        """The token in the file; empty if earlier changes are unknown. Raises OSError."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return ""
        try:
            return _token(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """The lock, for the `with` block. Raises OSError, such as TimeoutError."""
        descriptor = self._locked()
        try:
            turn = Turn(_token(descriptor), secrets.token_hex(_TOKEN_BYTES))
            _write_token(descriptor, _NO_TOKEN)
            try:
                yield turn
            finally:
                _write_token(descriptor, turn.after)
        finally:
            os.close(descriptor)

    def _locked(self) -> int:
        give_up_at = time.monotonic() + _TURN_WAIT_SECONDS
        while True:
            descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_there(descriptor):
                    return descriptor
            except BlockingIOError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            if time.monotonic() > give_up_at:
                raise TimeoutError(errno.ETIMEDOUT, "another process keeps it locked", self._path)
            time.sleep(_TURN_PAUSE_SECONDS)

    def _is_there(self, descriptor: int) -> bool:
        """Whether the file has not been removed since it was opened."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self._path), os.fstat(descriptor))
        return False


def _token(descriptor: int) -> str:
    token = os.pread(descriptor, len(_NO_TOKEN), 0).decode("ascii", "replace")
    return "" if token == _NO_TOKEN else token


def _write_token(descriptor: int, token: str) -> None:
    """Write the token in place, so that a full disk has room for it. If that fails, as on a full
    copy-on-write file system, every process lists the folder again."""
    with suppress(OSError):
        os.pwrite(descriptor, token.encode(), 0)


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
        """Held while index and folder are compared or changed; acquired before `_lock`."""
        self._lock = threading.Lock()
        self._deleted = threading.Condition(self._lock)
        self._index = FileIndex()
        self._deleting: set[str] = set()
        """Names of files that are being deleted and are no longer in the index."""
        self._new_files: list[StoredFile] = []
        """Files stored by other processes, until `take_new_keys`."""
        self._removed_files: list[StoredFile] = []
        """Files evicted or deleted, until `take_removed_keys`."""
        self._last_token, self._list_again_at = "", float("inf")
        """The token of the last listing, and the time to list again in case that one was old."""
        self._last_use = self._evictions = 0
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._catch_up(self._folder_lock.token)

    # ---- readings ------------------------------------------------------------------------

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
        """(files, their bytes, files evicted by this process)."""
        with self._lock:
            return len(self._index), self._index.size_bytes, self._evictions

    def path(self, file: StoredFile) -> Path:
        return self.root / file.owner / file.name

    def take_new_keys(self, owner: str) -> list[str]:
        """Keys of files that other processes have stored since the last call."""
        with self._lock:
            new_files, self._new_files = self._new_files, []
        return [file.key for file in new_files if file.owner == owner]

    def take_removed_keys(self, owner: str) -> list[str]:
        """Keys of files that were evicted, or deleted by other processes, since the last call."""
        with self._lock:
            removed_files, self._removed_files = self._removed_files, []
        return [file.key for file in removed_files if file.owner == owner]

    # ---- with other processes ------------------------------------------------------------

    def refresh(self) -> None:
        """Index the changes of other processes; without any, this only reads one small file.

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
                self._last_token = turn.after
                yield

    def _catch_up(self, token: str) -> None:
        """Compare the index with the folder, unless that is unchanged. Needs `_changing`."""
        now = time.monotonic()
        if token and token == self._last_token and now < self._list_again_at:
            return
        names_by_owner = list_names(self.root)
        with self._lock:
            new_names, removed_files = self._index.compare(names_by_owner)
            new_names = [(owner, name) for owner, name in new_names if name not in self._deleting]
        entries = (read_entry(self.root, owner, name) for owner, name in new_names)
        new_files = [file for file in entries if file is not None]
        with self._lock:
            self._removed_files += [file for file in removed_files if self._index.remove(file)]
            for file in new_files:
                self._index.add(file)
                self._last_use = max(self._last_use, file.used_ns)
            self._new_files += new_files
        self._list_again_at = now + _LATE_SECONDS if token != self._last_token else float("inf")
        self._last_token = token

    # ---- changes ---------------------------------------------------------------------

    def rename(self, temporary: Path, owner: str, name: str, size_bytes: int) -> None:
        """Give a written file its name. Needs a turn; raises OSError."""
        with self._lock:
            self._deleted.wait_for(lambda: name not in self._deleting)
            file = StoredFile(self._next_use(), owner, name, size_bytes)
        os.utime(temporary, ns=(file.used_ns, file.used_ns))
        temporary.rename(self.path(file))
        with self._lock:
            self._index.add(file)

    def touch(self, owner: str, key: str) -> None:
        """Record a use of a file, for all processes."""
        with self._lock:
            indexed_file = self._index.find(owner, key)
            if indexed_file is None:
                return
            file = indexed_file._replace(used_ns=self._next_use())
            self._index.add(file)
        with suppress(OSError):
            os.utime(self.path(file), ns=(file.used_ns, file.used_ns))

    def evict_to(self, max_bytes: int, keep: Collection[str] = ()) -> None:
        """Delete the least recently used files of all owners, down to `max_bytes`.

        Names in `keep` stay. Needs a turn; raises OSError for a file that can't be deleted.
        """
        while True:
            with self._lock:
                file = self._index.oldest(keep)
                if file is None or self._index.size_bytes <= max_bytes:
                    return
            entry = read_entry(self.root, file.owner, file.name)
            if entry is not None and entry.used_ns > file.used_ns:  # another process used it
                with self._lock:
                    if self._index.remove(file):
                        self._index.add(entry)
                continue
            if self.delete(file):
                with self._lock:
                    self._removed_files.append(file)
                    self._evictions += entry is not None

    def delete(self, file: StoredFile) -> bool:
        """Delete a file; returns whether it was known. Raises OSError; it then stays known."""
        with self._lock:
            if not self._index.remove(file):
                return False
            self._deleting.add(file.name)
        try:
            self.path(file).unlink(missing_ok=True)
        except OSError:
            with self._lock:
                self._index.add(file)
            raise
        finally:
            with self._lock:
                self._deleting.discard(file.name)
                self._deleted.notify_all()
        return True

    def forget(self, file: StoredFile) -> None:
        """Drop `file`, which is gone, from the index."""
        with self._lock:
            self._index.remove(file)

    def _next_use(self) -> int:
        """The time in ns, but later than all earlier uses, even if the clock was set back: else new
        files would be evicted first. Needs the lock."""
        self._last_use = max(self._last_use + 1, time.time_ns())
        return self._last_use
