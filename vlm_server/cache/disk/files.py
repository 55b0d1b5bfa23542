"""The files of a `DiskStore`: names, index and writing.

    FOLDER/lock                              see `folder`
    FOLDER/<owner>/<key>-<SHA-256>.safetensors
    FOLDER/<owner>/tmp-<writer>-<key>.safetensors      being written, and locked by the writer

A key is a word, a dash and 64 hex digits, an owner 64 hex digits. Nothing else in the folder is
touched.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import socket
import stat
import sys
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_OWNER = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"([a-z]+-[0-9a-f]{64})-([0-9a-f]{64})\.safetensors")
_TEMPORARY = re.compile(r"tmp-.*\.safetensors")


class StoredFile(NamedTuple):
    """A complete file. Sorts by its last use."""

    used_ns: int
    """The time of the last use, in ns since the epoch."""
    owner: str
    name: str
    size_bytes: int

    @property
    def key(self) -> str:
        return key_and_digest(self.name)[0]


class FileIndex:
    """An index of files by owner and name, and by last use. Reads no disk. Not thread-safe."""

    def __init__(self) -> None:
        self._owners: dict[str, dict[str, StoredFile]] = {}
        self._names: dict[tuple[str, str], str] = {}
        """Names by owner and key."""
        self._order: list[StoredFile] = []
        """All files, the least recently used first."""
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[StoredFile]:
        return iter(self._order)

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return self._size_bytes

    def files_of(self, owner: str) -> list[StoredFile]:
        """All files of an owner."""
        return list(self._owners.get(owner, {}).values())

    def find(self, owner: str, key: str) -> StoredFile | None:
        """The file of a key; if there are several, the one added last."""
        name = self._names.get((owner, key))
        return None if name is None else self._owners[owner][name]

    def add(self, file: StoredFile) -> None:
        """Add a file, replacing the one of this name."""
        self.remove(file)
        self._owners.setdefault(file.owner, {})[file.name] = file
        self._names[file.owner, file.key] = file.name
        insort(self._order, file)
        self._size_bytes += file.size_bytes

    def remove(self, file: StoredFile) -> bool:
        """Remove the file of this name; returns whether it was known."""
        indexed_file = self._owners.get(file.owner, {}).pop(file.name, None)
        if indexed_file is None:
            return False
        if self._names.get((file.owner, file.key)) == file.name:
            del self._names[file.owner, file.key]
        del self._order[bisect_left(self._order, indexed_file)]
        self._size_bytes -= indexed_file.size_bytes
        return True

    def oldest(self, keep: Collection[str]) -> StoredFile | None:
        """The least recently used file whose name is not in `keep`."""
        return next((file for file in self._order if file.name not in keep), None)

    def compare(
        self, names_by_owner: Mapping[str, set[str]]
    ) -> tuple[list[tuple[str, str]], list[StoredFile]]:
        """(owner and name) of unknown files in `names_by_owner`, and known files not in it."""
        new_names = [
            (owner, name)
            for owner, names in names_by_owner.items()
            for name in names - self._owners.get(owner, {}).keys()
        ]
        removed_files = [
            files[name]
            for owner, files in self._owners.items()
            for name in files.keys() - names_by_owner.get(owner, set())
        ]
        return new_names, removed_files


def default_folder() -> Path:
    """The system's folder for caches of the current user."""
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/vlm-server"
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(caches) if os.path.isabs(caches) else Path.home() / ".cache") / "vlm-server"


def list_names(folder: Path) -> dict[str, set[str]]:
    """Names of all entries of the owners' folders, by owner. Raises OSError."""
    names_by_owner = dict[str, set[str]]()
    with suppress(FileNotFoundError):
        for owner in filter(_OWNER.fullmatch, os.listdir(folder)):
            with suppress(FileNotFoundError, NotADirectoryError):
                if not (folder / owner).is_symlink():
                    names_by_owner[owner] = set(os.listdir(folder / owner))
    return names_by_owner


def read_entry(folder: Path, owner: str, name: str) -> StoredFile | None:
    """The file of this name; None if it is no complete file of a store. Raises OSError."""
    if not _NAME.fullmatch(name):
        return None
    try:
        entry = (folder / owner / name).lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(entry.st_mode):
        return None
    return StoredFile(entry.st_mtime_ns, owner, name, entry.st_size)


def key_and_digest(name: str) -> tuple[str, str]:
    """The key in a file's name, and the SHA-256 of its content."""
    match = _NAME.fullmatch(name)
    assert match is not None
    return match[1], match[2]


def temporary_name(key: str, pid: int) -> str:
    """The name of a file that process `pid` of this machine is writing: different for every
    process, in case locks do not work."""
    writer = hashlib.sha256(f"{socket.gethostname()} {pid}".encode()).hexdigest()[:16]
    return f"tmp-{writer}-{key}.safetensors"


def claim(temporary: Path) -> int | None:
    """Create an empty file; returns a descriptor that locks it until closed.

    None if another writer has it. Raises OSError.
    """
    descriptor = os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def remove_abandoned(folder: Path) -> None:
    """Delete unfinished files of ended processes, and owners' empty folders.

    No process may `claim` at the same time. Raises OSError.
    """
    for owner, names in list_names(folder).items():
        for name in filter(_TEMPORARY.fullmatch, names):
            path = folder / owner / name
            with suppress(FileNotFoundError):  # its writer has failed, and deleted it
                if not stat.S_ISREG(path.lstat().st_mode):
                    continue
                descriptor = claim(path)
                if descriptor is not None:
                    path.unlink(missing_ok=True)
                    os.close(descriptor)
        with suppress(OSError):  # it is not empty
            (folder / owner).rmdir()


def sync(path: Path) -> tuple[str, int]:
    """Flush a file to the disk; returns its SHA-256 in hex and its size in bytes."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return digest, os.fstat(file.fileno()).st_size


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
