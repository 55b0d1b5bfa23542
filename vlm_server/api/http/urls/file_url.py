"""The reading of `file:` URLs, in folders named by the settings.

Clients learn nothing about other files: a URL outside these folders is refused without a look at
the disk, and unreadable files in them get the same answer.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from vlm_server.api.http.urls.fetch import TooLarge

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class NotReadable(Exception):
    """The URL names no file that may be read."""


def read(url: str, roots: Sequence[Path], max_bytes: int) -> bytes:
    """The bytes of a regular file below one of `roots`, which are absolute.

    Links must stay below the same root. Raises NotReadable or TooLarge.
    """
    path = _path(url)
    for root in roots:
        if root in path.parents:
            try:
                return _read(root, path, max_bytes)
            except OSError:
                raise NotReadable from None
    raise NotReadable


def _path(url: str) -> Path:
    """The absolute path that `url` names, without `..`."""
    try:
        parts = urlsplit(url)
        path = os.fsdecode(unquote_to_bytes(parts.path))
    except ValueError:
        raise NotReadable from None
    is_plain = parts.scheme == "file" and parts.netloc.lower() in ("", "localhost")
    if not is_plain or parts.query or parts.fragment:
        raise NotReadable
    if not path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise NotReadable
    return Path("/" + path.lstrip("/"))


def _read(root: Path, path: Path, max_bytes: int) -> bytes:
    """The bytes of the file. Raises OSError, NotReadable or TooLarge."""
    real_root = Path(os.path.realpath(root, strict=True))
    real_path = Path(os.path.realpath(path, strict=True))
    if real_root not in real_path.parents:
        raise NotReadable
    descriptor = _open_below(real_root, real_path.relative_to(real_root).parts)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotReadable
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise TooLarge
    return data


def _open_below(root: Path, parts: Sequence[str]) -> int:
    """A descriptor of the file, opened folder by folder without following a link. Raises OSError.

    A folder replaced by a link after the path was resolved is an error.
    """
    folder = os.open(root, _OPEN | os.O_DIRECTORY)
    try:
        for name in parts[:-1]:
            inner = os.open(name, _OPEN | os.O_DIRECTORY, dir_fd=folder)
            os.close(folder)
            folder = inner
        return os.open(parts[-1], _OPEN, dir_fd=folder)
    finally:
        os.close(folder)
