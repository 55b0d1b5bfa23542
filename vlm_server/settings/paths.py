"""Paths as people write them, and why one can't be read."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

_GUARDED = ("Desktop", "Documents", "Downloads")
_VOLUMES = Path("/Volumes")


def expanded(path: str | Path) -> Path:
    """`path` with a home folder for its `~`; as it is, where there is no such user or home.

    `Path.expanduser` raises RuntimeError for those.
    """
    return Path(os.path.expanduser(path))


def guarded_folder(path: Path) -> Path | None:
    """The folder around `path` that macOS lets a program read only if its user has allowed that."""
    if sys.platform == "darwin":
        folders = [*(expanded("~") / name for name in _GUARDED), _VOLUMES]
        return next((each for each in folders if path.absolute().is_relative_to(each)), None)
    return None


def why_unreadable(path: Path, error: OSError) -> str:
    """What the system says, and what to do where macOS guards the folder."""
    folder = guarded_folder(path) if error.errno == errno.EPERM else None
    guard = f" (macOS guards {folder}: {allow_or_move()})" if folder else ""
    return f"{error.strerror}{guard}"


def allow_or_move() -> str:
    """What to do about a guarded folder."""
    program = Path(sys.executable).resolve()
    return f"give {program} Full Disk Access in Privacy & Security of the settings, or move it"
