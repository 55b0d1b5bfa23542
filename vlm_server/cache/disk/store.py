"""Files by key that outlive the process, bounded in bytes, in a folder that processes share.

A file is written under another name, synced and renamed, so it is complete or absent. Its name
contains its SHA-256, so that a damaged file is never used.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from vlm_server.cache.disk.files import (
    StoredFile,
    claim,
    key_and_digest,
    remove_abandoned,
    sync,
    sync_folder,
    temporary_name,
)
from vlm_server.cache.disk.folder import SharedFolder, is_gone
from vlm_server.protocol import CacheStats

logger = logging.getLogger(__name__)

_TRANSIENT = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EAGAIN})


def is_transient(error: BaseException) -> bool:
    """Whether the error is a lack of memory, descriptors or the like: the file may be sound."""
    is_memory = isinstance(error, MemoryError)
    return is_memory or (isinstance(error, OSError) and error.errno in _TRANSIENT)


class DiskStore:
    """The files of one owner, in a folder that other processes and owners share.

    Files of other processes are found after `refresh`; their uses count; their deletions are
    misses. Evicts the least recently used file of any owner. The limit is the sum of all files,
    except one that each process may be writing. Thread-safe, but only one thread may call
    `make_room`, `evict` and `put`. Files are read, written and deleted without a lock. See `files`
    for keys and owners.
    """

    def __init__(self, name: str, folder: Path, owner: str, limit_bytes: int) -> None:
        """Raises OSError if the folder can't be used."""
        self._name, self._owner, self._limit_bytes = name, owner, limit_bytes
        self._own_folder = folder / owner
        self._lock = threading.Lock()
        self._hits = self._misses = self._damaged = 0
        self._folder = SharedFolder(folder)
        with self._folder.turn():
            remove_abandoned(folder)
            self._folder.evict_to(limit_bytes)
            self._own_folder.mkdir(mode=0o700, exist_ok=True)
            self._own_folder.chmod(0o700)  # fails if it is another user's

    @property
    def paths(self) -> dict[str, Path]:
        """This owner's files, by key."""
        return {file.key: self._folder.path(file) for file in self._folder.files_of(self._owner)}

    def path(self, key: str) -> Path | None:
        """The path of a file; None if it is not stored."""
        file = self._file(key)
        return None if file is None else self._folder.path(file)

    def __contains__(self, key: str) -> bool:
        return self._file(key) is not None

    def size_of(self, key: str) -> int | None:
        """The bytes of a file; None if it is not stored. Reads nothing."""
        file = self._file(key)
        return None if file is None else file.size_bytes

    def refresh(self) -> tuple[list[str], list[str]]:
        """This owner's keys that other processes stored, and those gone, since the last call.

        See `SharedFolder.refresh`.
        """
        self._folder.refresh()
        return self._folder.take_new_keys(self._owner), self._folder.take_removed_keys(self._owner)

    def make_room(self, size_bytes: int, keep: Collection[str] = ()) -> list[str] | None:
        """Evict files, but none of `keep`, until one of `size_bytes` fits.

        Returns the keys of this owner's files that are gone; None if it can't fit, and all stay.
        Raises OSError if a file can't be deleted, or if the folder was removed and can't be made
        again.
        """
        with self._folder.turn():
            if not self._make_room(size_bytes, keep):
                return None
        return self._folder.take_removed_keys(self._owner)

    def evict(self, size_bytes: int, keep: Collection[str] = ()) -> list[str] | None:
        """Delete files of `size_bytes`, but none of `keep`, when the disk itself is full.

        Returns the keys of this owner's files that are gone; None if a file of `size_bytes` can't
        fit even so, and all stay. Raises OSError as `make_room` does.
        """
        free_bytes = shutil.disk_usage(self._folder.root).free
        with self._folder.turn():
            kept_files = self._files(keep)
            _, stored_bytes, _ = self._folder.counts
            if free_bytes + stored_bytes - _bytes_of(kept_files) < size_bytes:
                return None
            self._folder.evict_to(stored_bytes - size_bytes, _names_of(kept_files))
        return self._folder.take_removed_keys(self._owner)

    def put(self, key: str, write: Callable[[Path], None], keep: Collection[str] = ()) -> list[str]:
        """Store the file that `write` makes, unless `key` has one.

        Does nothing while another store of this process writes it. Evicts again, but none of
        `keep`, if other processes took the room. Returns the keys of this owner's files that are
        gone. Raises OSError if it can't be written or there is no room, and the errors of `write`.
        """
        if key in self:
            return []
        temporary = self._own_folder / temporary_name(key, os.getpid())
        with self._folder.turn():
            self._own_folder.mkdir(mode=0o700, exist_ok=True)  # a user may have emptied the cache
            descriptor = claim(temporary)
        if descriptor is not None:
            try:
                write(temporary)
                self._publish(key, temporary, keep)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
            sync_folder(self._own_folder)
        return self._folder.take_removed_keys(self._owner)

    def get(self, key: str) -> bytes | None:
        """The content of a file; None if it is not stored or damaged.

        Raises OSError or MemoryError for errors without relation to the file (`is_transient`).
        """
        data = None
        try:
            data = self._read(key)
        finally:
            with self._lock:
                self._hits += data is not None
                self._misses += data is None
        return data

    def count_miss(self) -> None:
        """Count a miss found without `get`."""
        with self._lock:
            self._misses += 1

    def touch(self, keys: Iterable[str]) -> None:
        """Record a use of each key's file, in this order."""
        for key in keys:
            self._folder.touch(self._owner, key)

    def discard(self, key: str) -> None:
        """Delete a damaged file."""
        if file := self._file(key):
            self._discard(file)

    def stats(self) -> CacheStats:
        entries, size_bytes, evictions = self._folder.counts
        with self._lock:
            return CacheStats(
                name=self._name,
                entries=entries,
                size_bytes=size_bytes,
                pinned_bytes=0,
                limit_bytes=self._limit_bytes,
                hits=self._hits,
                misses=self._misses,
                evictions=evictions,
                damaged=self._damaged,
            )

    # ---- inside ----------------------------------------------------------------------

    def _file(self, key: str) -> StoredFile | None:
        return self._folder.find(self._owner, key)

    def _files(self, keys: Iterable[str]) -> list[StoredFile]:
        return [file for key in keys if (file := self._file(key))]

    def _make_room(self, size_bytes: int, keep: Collection[str]) -> bool:
        """Evict for `size_bytes`, but none of `keep`; returns whether they fit. Needs a turn."""
        kept_files = self._files(keep)
        if _bytes_of(kept_files) + size_bytes > self._limit_bytes:
            return False
        self._folder.evict_to(self._limit_bytes - size_bytes, _names_of(kept_files))
        return True

    def _publish(self, key: str, temporary: Path, keep: Collection[str]) -> None:
        """Give a written file its name, unless the key has a file by now."""
        digest, size_bytes = sync(temporary)
        with self._folder.turn():
            if key in self:
                temporary.unlink()
                return
            if not self._make_room(size_bytes, keep):
                raise OSError(errno.EFBIG, "there is no room for a cache file", str(temporary))
            name = f"{key}-{digest}.safetensors"
            self._folder.rename(temporary, self._owner, name, size_bytes)

    def _read(self, key: str) -> bytes | None:
        file = self._file(key)
        if file is None:
            return None
        try:
            data = self._folder.path(file).read_bytes()
            if hashlib.sha256(data).hexdigest() == key_and_digest(file.name)[1]:
                return data
        except OSError as error:
            logger.debug("a cache file can't be read", exc_info=True)
            if is_transient(error):
                raise  # the file may be sound
            if is_gone(error):
                self._folder.forget(file)
                return None
        self._discard(file)
        return None

    def _discard(self, file: StoredFile) -> None:
        """Delete a damaged file, unless it was evicted or replaced since it was looked up."""
        try:
            is_known = self._folder.delete(file)
        except OSError:
            self._folder.forget(file)
            is_known = True
        if is_known:
            with self._lock:
                self._damaged += 1
            logger.warning("a cache file is damaged, and deleted: %s", self._folder.path(file))


def _bytes_of(files: Iterable[StoredFile]) -> int:
    return sum(file.size_bytes for file in files)


def _names_of(files: Iterable[StoredFile]) -> set[str]:
    return {file.name for file in files}
