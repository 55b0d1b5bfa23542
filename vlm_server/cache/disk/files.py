"""The files of a `DiskStore`: their names, what there is of them, and how they are written.

    FOLDER/lock                              see `turns`
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
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_OWNER = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"([a-z]+-[0-9a-f]{64})-([0-9a-f]{64})\.safetensors")
_TEMPORARY = re.compile(r"tmp-.*\.safetensors")


class StoredFile(NamedTuple):
    """A file that is whole. In the order of their last uses, in ns since the epoch."""

    used_ns: int
    owner: str
    name: str
    size_bytes: int

    @property
    def key(self) -> str:
        return key_and_digest(self.name)[0]


def default_folder() -> Path:
    """The system's folder for caches of the current user."""
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/vlm-server"
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(caches) if os.path.isabs(caches) else Path.home() / ".cache") / "vlm-server"


def list_names(folder: Path) -> dict[str, set[str]]:
    """All that lies in the owners' folders, by owner. Raises OSError."""
    there = dict[str, set[str]]()
    with suppress(FileNotFoundError):
        for owner in filter(_OWNER.fullmatch, os.listdir(folder)):
            with suppress(FileNotFoundError, NotADirectoryError):
                if not (folder / owner).is_symlink():
                    there[owner] = set(os.listdir(folder / owner))
    return there


def look_at(folder: Path, owner: str, name: str) -> StoredFile | None:
    """What is there by this name; None if it is no whole file of a store. Raises OSError."""
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
    """Of what a process of this machine writes: even where locks are of no use to tell others, no
    two write one file."""
    writer = hashlib.sha256(f"{socket.gethostname()} {pid}".encode()).hexdigest()[:16]
    return f"tmp-{writer}-{key}.safetensors"


def claim(temporary: Path) -> int | None:
    """Make an empty file, locked until the descriptor that this returns is closed.

    None if somebody is writing it. Raises OSError.
    """
    held = os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(held, 0)
    except BlockingIOError:
        os.close(held)
        return None
    except OSError:
        os.close(held)
        raise
    return held


def remove_abandoned(folder: Path) -> None:
    """Delete what processes that are gone did not write to its end, and owners' empty folders.

    Nobody may `claim` meanwhile. Raises OSError.
    """
    for owner, names in list_names(folder).items():
        for name in filter(_TEMPORARY.fullmatch, names):
            path = folder / owner / name
            with suppress(FileNotFoundError):  # its writer has failed, and deleted it
                if not stat.S_ISREG(path.lstat().st_mode):
                    continue
                held = claim(path)
                if held is not None:
                    path.unlink(missing_ok=True)
                    os.close(held)
        with suppress(OSError):  # it is not empty
            (folder / owner).rmdir()


def sync(path: Path) -> tuple[str, int]:
    """Bring a file to the disk. Returns its SHA-256 in hex and its bytes."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
        return digest, os.fstat(file.fileno()).st_size


def sync_folder(path: Path) -> None:
    held = os.open(path, os.O_RDONLY)
    try:
        os.fsync(held)
    finally:
        os.close(held)
