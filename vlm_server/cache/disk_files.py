"""The files of a `DiskStore`: their names, who may use the folder, what is there at the start.

    FOLDER/lock                              held by the one process that uses the folder
    FOLDER/<owner>/<key>-<SHA-256>.safetensors
    FOLDER/<owner>/tmp-<key>.safetensors     not written to its end

A key is a word, a dash and 64 hex digits, an owner 64 hex digits. Nothing else in the folder is
touched.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import stat
import sys
from contextlib import suppress
from pathlib import Path

_OWNER = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"([a-z]+-[0-9a-f]{64})-([0-9a-f]{64})\.safetensors")
_TEMPORARY = re.compile(r"tmp-.*\.safetensors")


def default_folder() -> Path:
    """The system's folder for caches of the current user."""
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/vlm-server"
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(caches) if os.path.isabs(caches) else Path.home() / ".cache") / "vlm-server"


def lock_file(path: Path) -> int:
    """Lock `path` until the process ends or the descriptor that this returns is closed.

    Raises OSError, for instance if another process has it locked.
    """
    held = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise
    return held


def sweep(folder: Path) -> list[tuple[Path, int]]:
    """All owners' files and their sizes, least recently used first.

    Deletes files that were not written to their end, and the folders of owners that have none.
    """
    files = []
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
                files.append((entry.st_mtime_ns, path, entry.st_size))
        with suppress(OSError):  # it is not empty
            owner.rmdir()
    return [(path, size_bytes) for _, path, size_bytes in sorted(files)]


def key_and_digest(path: Path) -> tuple[str, str]:
    """The key in a file's name, and the SHA-256 of its content."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return match[1], match[2]


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
