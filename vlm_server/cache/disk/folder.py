"""The files in a folder that several processes change: what there is, and what is evicted."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vlm_server.cache.disk.files import StoredFile, list_names, look_at
from vlm_server.cache.disk.folder_lock import FolderLock
from vlm_server.cache.disk.index import FileIndex

logger = logging.getLogger(__name__)

_GONE = frozenset({errno.ENOENT, errno.ESTALE})
"""ESTALE: another machine deleted it, on a network file system."""
_REFRESH_WAIT_SECONDS = 0.05
"""For whoever changes the folder: a look-up does with what is known then."""
_LATE_SECONDS = 60.0
"""So long a network file system may keep an old listing (Linux: `acdirmax`)."""


def is_gone(error: BaseException) -> bool:
    """Whether the file was deleted: by another process, to make room, or by a person."""
    return isinstance(error, OSError) and error.errno in _GONE


class SharedFolder:
    """All owners' files, as this process knows them. Thread-safe.

    What others did is known after `refresh`, and in a `turn`. What is known says nothing of files
    that were deleted since: to find one gone is no error. The folder is listed, and files are
    deleted, without the lock that look-ups need.
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
        """Names of files that do not count any more and are being deleted."""
        self._found: list[StoredFile] = []
        self._gone: list[StoredFile] = []
        """What was not reported yet."""
        self._seen, self._list_again_at = "", float("inf")
        """The token when the folder was listed last, and when that may have been out of date."""
        self._last_use = self._evictions = 0
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._catch_up(self._folder_lock.token)

    # ---- what is known -------------------------------------------------------------------

    def find(self, owner: str, key: str) -> StoredFile | None:
        with self._lock:
            return self._index.find(owner, key)

    def of(self, owner: str) -> list[StoredFile]:
        """All files of an owner."""
        with self._lock:
            return self._index.of(owner)

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
        """See what others have changed; if nothing, that costs a look at one small file.

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
        """While no other process changes the folder, and what is in it is known.

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
        """With `_changing`: compare the index with the folder, unless nobody changed it."""
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
        """In a turn: give a file that was written its name. Raises OSError."""
        with self._lock:
            self._deleted.wait_for(lambda: name not in self._leaving)
            file = StoredFile(self._next_use(), owner, name, size_bytes)
        os.utime(temporary, ns=(file.used_ns, file.used_ns))
        temporary.rename(self.path(file))
        with self._lock:
            self._index.add(file)

    def touch(self, owner: str, key: str) -> None:
        """Note a use of a file, for all processes."""
        with self._lock:
            known = self._index.find(owner, key)
            if known is None:
                return
            file = known._replace(used_ns=self._next_use())
            self._index.add(file)
        with suppress(OSError):
            os.utime(self.path(file), ns=(file.used_ns, file.used_ns))

    def evict_to(self, most_bytes: int, keep: Collection[str] = ()) -> None:
        """In a turn: delete what no process used for longest, until no more than that is left.

        Nothing whose name is in `keep`. Raises OSError for a file that can't be deleted.
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
        """Delete a file; whether it was known until then. Raises OSError; it counts again then."""
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
        """With the lock: the time, but later than all uses before, also those by a clock that was
        ahead: what is new would be evicted before their files."""
        self._last_use = max(self._last_use + 1, time.time_ns())
        return self._last_use
