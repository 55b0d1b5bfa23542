"""Files by key that outlive the process, bounded in bytes.

A file is written under another name, synced and renamed: it is there as a whole or not at all. Its
name has its SHA-256, so that a file that is not what was written is never used.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from vlm_server.cache.disk_files import key_and_digest, lock_file, sweep, sync, sync_folder
from vlm_server.protocol import CacheStats

logger = logging.getLogger(__name__)

_PASSING = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EINTR, errno.EAGAIN})


def is_passing(error: BaseException) -> bool:
    """Whether this process or machine lacks what reading takes: it says nothing of the file."""
    is_memory = isinstance(error, MemoryError)
    return is_memory or (isinstance(error, OSError) and error.errno in _PASSING)


class DiskStore:
    """The files of one owner; evicts the least recently used file, whoever's it is.

    Thread-safe, except that only one thread may call `make_room` and `put`. Files are read, written
    and deleted without the lock. See `disk_files` for keys and owners.
    """

    def __init__(self, name: str, folder: Path, owner: str, limit_bytes: int) -> None:
        """Raises OSError if the folder can't be used, or another process uses it."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._root, self._lock_file = folder, lock_file(folder / "lock")
        self._name, self._folder, self._limit_bytes = name, folder / owner, limit_bytes
        self._lock = threading.Lock()
        self._deleted = threading.Condition(self._lock)
        self._sizes: OrderedDict[Path, int] = OrderedDict()
        """Of all owners' files, least recently used first."""
        self._paths: dict[str, Path] = {}
        """Of this owner's files, by key."""
        self._leaving: set[Path] = set()
        """Files that do not count any more and are being deleted."""
        self._size_bytes = self._last_use = 0
        self._hits = self._misses = self._evictions = self._damaged = 0
        for path, size_bytes in sweep(folder):
            self._delete(self._add(path, size_bytes))
        self._delete(self._evict(0))
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._folder.chmod(0o700)  # fails if it is somebody else's

    def close(self) -> None:
        """Let other processes use the folder."""
        os.close(self._lock_file)

    @property
    def paths(self) -> dict[str, Path]:
        """This owner's files, by key."""
        with self._lock:
            return dict(self._paths)

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._paths

    def size_of(self, key: str) -> int | None:
        """The bytes of a file; None if it is not stored. Reads nothing."""
        with self._lock:
            path = self._paths.get(key)
            return None if path is None else self._sizes[path]

    def make_room(self, size_bytes: int, keep: Collection[str] = ()) -> list[str] | None:
        """Evict until a file of `size_bytes` fits, but none of `keep`.

        Returns the keys of this owner's files that are gone; None, and all stay, if it would not
        fit. Raises OSError if a file can't be deleted, or if the folder was removed and can't be
        made again.
        """
        lost = self._replace_folder() if self._is_removed() else []
        with self._lock:
            kept = {self._paths[key] for key in keep if key in self._paths}
            if sum(self._sizes[path] for path in kept) + size_bytes > self._limit_bytes:
                return None
            leaving = self._evict(size_bytes, kept)
        self._delete(leaving)
        return [*lost, *self._own_keys(leaving)]

    def evict(self, size_bytes: int, keep: Collection[str] = ()) -> list[str] | None:
        """Delete files of so many bytes, the disk itself being short; none of `keep`.

        Returns the keys of this owner's files that are gone; None, and all stay, if a file of
        `size_bytes` would not fit even so. Raises OSError as `make_room` does.
        """
        free = shutil.disk_usage(self._root).free
        with self._lock:
            kept = {self._paths[key] for key in keep if key in self._paths}
            if free + self._size_bytes - sum(self._sizes[path] for path in kept) < size_bytes:
                return None
            leaving = self._evict(self._limit_bytes - self._size_bytes + size_bytes, kept)
        self._delete(leaving)
        return self._own_keys(leaving)

    def put(self, key: str, write: Callable[[Path], None]) -> None:
        """Store the file that `write` makes; one that is stored under `key` already stays.

        Raises OSError if it can't be written or there is no room, and what `write` raises.
        """
        if key in self:
            return
        temporary = self._folder / f"tmp-{key}.safetensors"
        self._folder.mkdir(mode=0o700, exist_ok=True)  # somebody may have emptied the cache
        try:
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
            write(temporary)
            digest, size_bytes = sync(temporary)
            path = self._folder / f"{key}-{digest}.safetensors"
            with self._lock:
                self._deleted.wait_for(lambda: path not in self._leaving)
                has_room = self._size_bytes + size_bytes <= self._limit_bytes
            if not has_room:
                raise OSError(errno.EFBIG, "no room was made for a cache file", str(temporary))
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(self._folder)
        with self._lock:
            replaced = self._add(path, size_bytes)
        self._delete(replaced)

    def get(self, key: str) -> bytes | None:
        """The whole file; None if it is not stored, or is not what was written.

        Raises OSError, or MemoryError, if this process or machine lacks what reading takes.
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
        """Something was looked up by other means than `get`, and is not stored."""
        with self._lock:
            self._misses += 1

    def touch(self, keys: Iterable[str]) -> None:
        """Note a use of each, in this order."""
        for key in keys:
            with self._lock:
                path = self._paths.get(key)
                if path is None:
                    continue
                self._sizes.move_to_end(path)
                self._last_use = max(self._last_use + 1, time.time_ns())
                times = (self._last_use, self._last_use)
            with suppress(OSError):
                os.utime(path, ns=times)

    def discard(self, key: str) -> None:
        """Delete a file that is not what was written."""
        with self._lock:
            path = self._paths.get(key)
        if path is not None:
            self._discard(key, path)

    def read(self) -> CacheStats:
        with self._lock:
            return CacheStats(
                name=self._name,
                entries=len(self._sizes),
                size_bytes=self._size_bytes,
                pinned_bytes=0,
                limit_bytes=self._limit_bytes,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
                damaged=self._damaged,
            )

    def check_integrity(self) -> None:
        """Raises AssertionError if it counts other files than there are, or over the limit."""
        with self._lock:
            there = {path: path.stat() for path in self._sizes}
            assert {path: entry.st_size for path, entry in there.items()} == self._sizes
            assert all(stat.S_IMODE(entry.st_mode) == 0o600 for entry in there.values())
            assert self._size_bytes == sum(self._sizes.values()) <= self._limit_bytes
            assert set(self._paths.values()) == set(self._sizes) & set(self._folder.iterdir())

    # ---- inside ----------------------------------------------------------------------

    def _own_keys(self, paths: Iterable[Path]) -> list[str]:
        return [key_and_digest(path)[0] for path in paths if path.parent == self._folder]

    def _is_removed(self) -> bool:
        """Whether the folder that this process has locked is not there any more."""
        try:
            there = os.stat(self._root / "lock")
        except FileNotFoundError:
            return True
        held = os.fstat(self._lock_file)
        return (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino)

    def _replace_folder(self) -> list[str]:
        """Make the folder again; returns the keys of all that was in it. Raises OSError."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock, old = lock_file(self._root / "lock"), self._lock_file
        self._lock_file = lock
        os.close(old)
        with self._lock:
            lost = list(self._paths)
            self._sizes.clear()
            self._paths.clear()
            self._size_bytes = 0
        logger.warning(
            "the folder of the disk cache was removed, and is made again: %s", self._root
        )
        for path, size_bytes in sweep(self._root):
            with self._lock:
                replaced = self._add(path, size_bytes)
            self._delete(replaced)
        return [key for key in lost if key not in self]

    def _read(self, key: str) -> bytes | None:
        with self._lock:
            path = self._paths.get(key)
        if path is None:
            return None
        try:
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() == key_and_digest(path)[1]:
                return data
        except OSError as error:
            logger.debug("a cache file can't be read", exc_info=True)
            if is_passing(error):
                raise  # the file is sound, as far as anyone knows
        self._discard(key, path)
        return None

    def _discard(self, key: str, path: Path) -> None:
        """Delete a damaged file, unless it was evicted or replaced since it was looked up."""
        with self._lock:
            if self._paths.get(key) != path:
                return
            self._forget(path)
            self._damaged += 1
        logger.warning("a cache file is damaged, and deleted: %s", path)
        self._unlink([path])

    def _add(self, path: Path, size_bytes: int) -> dict[Path, int]:
        """With the lock: count a file that is there. Returns what it replaces, to be deleted."""
        replaced: dict[Path, int] = {}
        if path.parent == self._folder:
            key, _ = key_and_digest(path)
            if key in self._paths:
                replaced[self._paths[key]] = self._forget(self._paths[key])
            self._paths[key] = path
        self._sizes[path] = size_bytes
        self._size_bytes += size_bytes
        return replaced

    def _evict(self, size_bytes: int, keep: Collection[Path] = ()) -> dict[Path, int]:
        """With the lock: count files no more until `size_bytes` fit. Returns those to delete."""
        victims, excess = list[Path](), self._size_bytes + size_bytes - self._limit_bytes
        for path, file_bytes in self._sizes.items():
            if excess <= 0:
                break
            if path not in keep:
                victims.append(path)
                excess -= file_bytes
        self._evictions += len(victims)
        return {path: self._forget(path) for path in victims}

    def _forget(self, path: Path) -> int:
        """With the lock: count a file no more, which then is to be deleted. Returns its size."""
        size_bytes = self._sizes.pop(path)
        self._size_bytes -= size_bytes
        if path.parent == self._folder:
            del self._paths[key_and_digest(path)[0]]
        self._leaving.add(path)
        return size_bytes

    def _delete(self, leaving: Mapping[Path, int]) -> None:
        """Without the lock: delete forgotten files of these sizes.

        Raises OSError for one that can't be deleted; it counts again.
        """
        failures = self._unlink(leaving)
        with self._lock:
            for path in failures:
                self._add(path, leaving[path])
                self._sizes.move_to_end(path, last=False)
        for error in failures.values():
            raise error

    def _unlink(self, paths: Collection[Path]) -> dict[Path, OSError]:
        """Without the lock: delete forgotten files. Returns those that can't be, and why."""
        failures: dict[Path, OSError] = {}
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                failures[path] = error
        with self._lock:
            self._leaving.difference_update(paths)
            self._deleted.notify_all()
        return failures
