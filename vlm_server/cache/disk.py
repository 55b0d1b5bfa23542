"""Files by key that outlive the process, bounded in bytes. Knows names and bytes; knows no tensor.

    FOLDER/lock                              held by the one process that uses the folder
    FOLDER/<owner>/<key>-<SHA-256>.safetensors

A file is written under another name, synced and renamed: it is there as a whole or not at all. Its
name tells what its SHA-256 is, so that one that is not what was written is never used.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import stat
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

from vlm_server.protocol import CacheStats

logger = logging.getLogger(__name__)

_OWNER = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"([a-z]+-[0-9a-f]{64})-([0-9a-f]{64})\.safetensors")
_TEMPORARY = re.compile(r"tmp-.*\.safetensors")


class DiskStore:
    """The files of one owner; evicts what was used longest ago, whoever's it is.

    Thread-safe, but that one thread alone calls `make_room` and `put`. A key is a word, a dash and
    64 hex digits, an owner 64 hex digits. Nothing else in the folder is touched.
    """

    def __init__(self, name: str, folder: Path, owner: str, limit_bytes: int) -> None:
        """Raises OSError if the folder can't be used, or another process does."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._held = _hold(folder / "lock")
        self._name, self._folder, self._limit_bytes = name, folder / owner, limit_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Path, int] = OrderedDict()
        """Of all owners' files; the one used longest ago comes first."""
        self._paths: dict[str, Path] = {}
        """Of the own files, by key."""
        self._size_bytes = self._last_use = 0
        self._hits = self._misses = self._evictions = self._damaged = 0
        for path, size_bytes in _sweep(folder):
            self._add(path, size_bytes)
        self._make_room(0)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._folder.chmod(0o700)  # fails if it is somebody else's

    def close(self) -> None:
        """Let others use the folder."""
        os.close(self._held)

    @property
    def paths(self) -> dict[str, Path]:
        """The own files, by key."""
        with self._lock:
            return dict(self._paths)

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._paths

    def make_room(self, size_bytes: int, keep: Collection[str] = ()) -> list[str] | None:
        """Evict until a file of `size_bytes` fits, but none of `keep`.

        Returns the keys of the own ones that are gone; None, and all stay, if it would not fit.
        """
        with self._lock:
            kept = {self._paths[key] for key in keep if key in self._paths}
            if sum(self._sizes[path] for path in kept) + size_bytes > self._limit_bytes:
                return None
            return self._make_room(size_bytes, kept)

    def put(self, key: str, write: Callable[[Path], None]) -> None:
        """Keep the file that `write` makes; one that is here under `key` stays.

        Raises OSError if it can't be written or finds no room, and what `write` raises.
        """
        if key in self:
            return
        temporary = self._folder / f"tmp-{key}.safetensors"
        self._folder.mkdir(mode=0o700, exist_ok=True)  # somebody may have emptied the cache
        try:
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
            write(temporary)
            digest, size_bytes = _sync(temporary)
            if self._size_bytes + size_bytes > self._limit_bytes:
                raise OSError(errno.EDQUOT, "no room was made for a cache file", str(temporary))
            path = self._folder / f"{key}-{digest}.safetensors"
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(self._folder)
        with self._lock:
            self._add(path, size_bytes)

    def get(self, key: str) -> bytes | None:
        """The whole file; None if it is not here, or is not what was written."""
        data = self._read(key)
        with self._lock:
            self._hits += data is not None
            self._misses += data is None
        return data

    def count_miss(self) -> None:
        """Something was looked for, by other means than `get`, and not found."""
        with self._lock:
            self._misses += 1

    def touch(self, keys: Iterable[str]) -> None:
        """These were used, one after the other."""
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
            path = self._paths.pop(key, None)
            if path is None:
                return
            self._size_bytes -= self._sizes.pop(path)
            self._damaged += 1
        logger.warning("a cache file is damaged, and deleted: %s", path)
        with suppress(OSError):
            path.unlink()

    def clear(self) -> None:
        """Count from zero; the files are there to stay."""
        with self._lock:
            self._hits = self._misses = self._evictions = self._damaged = 0

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

    def _read(self, key: str) -> bytes | None:
        with self._lock:
            path = self._paths.get(key)
        if path is None:
            return None
        try:
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() == _parts(path)[1]:
                return data
        except OSError:
            logger.debug("a cache file can't be read", exc_info=True)
        self.discard(key)
        return None

    def _add(self, path: Path, size_bytes: int) -> None:
        """Note a file that is there, and delete the one that it replaces."""
        self._sizes[path] = size_bytes
        self._size_bytes += size_bytes
        if path.parent == self._folder:
            key, _ = _parts(path)
            if key in self._paths:
                self._remove(self._paths[key])
            self._paths[key] = path

    def _make_room(self, size_bytes: int, keep: Collection[Path] = ()) -> list[str]:
        """Evict until `size_bytes` more fit. Returns the keys of those that were its own."""
        gone = []
        for path in [path for path in self._sizes if path not in keep]:
            if self._size_bytes + size_bytes <= self._limit_bytes:
                break
            if path.parent == self._folder:
                gone.append(_parts(path)[0])
            self._remove(path)
            self._evictions += 1
        return gone

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._size_bytes -= self._sizes.pop(path)
        if path.parent == self._folder:
            del self._paths[_parts(path)[0]]


def default_folder() -> Path:
    """Where the system wants caches of this person's programs."""
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/vlm-server"
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(caches) if os.path.isabs(caches) else Path.home() / ".cache") / "vlm-server"


def _hold(path: Path) -> int:
    """Holds `path` until the process ends or the number that this returns is closed."""
    held = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise
    return held


def _sweep(folder: Path) -> list[tuple[Path, int]]:
    """All owners' files and their sizes, the one used longest ago first.

    Deletes what was not written to its end, and the folders of owners that have nothing.
    """
    found = []
    for owner in folder.iterdir():
        if not _OWNER.fullmatch(owner.name) or not stat.S_ISDIR(owner.lstat().st_mode):
            continue
        for path in owner.iterdir():
            entry = path.lstat()
            if not stat.S_ISREG(entry.st_mode):
                continue
            if _TEMPORARY.fullmatch(path.name):
                path.unlink()
            elif _NAME.fullmatch(path.name):
                found.append((entry.st_mtime_ns, path, entry.st_size))
        with suppress(OSError):  # it is not empty
            owner.rmdir()
    return [(path, size_bytes) for _, path, size_bytes in sorted(found)]


def _parts(path: Path) -> tuple[str, str]:
    """The key in a file's name, and the SHA-256 of its content."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return match[1], match[2]


def _sync(path: Path) -> tuple[str, int]:
    """Bring a file to the disk. Returns its SHA-256 and its size."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return digest, os.fstat(file.fileno()).st_size


def _sync_folder(path: Path) -> None:
    held = os.open(path, os.O_RDONLY)
    try:
        os.fsync(held)
    finally:
        os.close(held)
