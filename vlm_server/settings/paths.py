"""Paths in settings, and the reasons why one can't be read."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from vlm_server.errors import ConfigError, NotAvailable

_GUARDED = ("Desktop", "Documents", "Downloads")
_VOLUMES = Path("/Volumes")
_FSTAB = Path("/etc/fstab")
_DISKS = (_VOLUMES, *map(Path, ("/media", "/mnt", "/run/media")))
"""Folders in which systems mount disks that come and go."""
_ESCAPE = re.compile(r"\\([0-7]{3})")


def expand_home(path: str | Path) -> Path:
    """`path` with a home folder for its `~`; as it is, where there is no such user or home.

    `Path.expanduser` raises RuntimeError for those.
    """
    return Path(os.path.expanduser(path))


def state_folder() -> Path:
    """Where the program keeps for a user what is neither a setting nor a cache."""
    folder = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (folder if folder.is_absolute() else expand_home("~/.local/state")) / "vlm-server"


def guarded_folder(path: Path) -> Path | None:
    """The folder around `path` that macOS lets a program read only if its user has allowed that."""
    if sys.platform == "darwin":
        folders = [*(expand_home("~") / name for name in _GUARDED), _VOLUMES]
        return next((folder for folder in folders if path.absolute().is_relative_to(folder)), None)
    return None


def why_unreadable(path: Path, error: OSError) -> str:
    """The system's error message, and advice where macOS guards the folder."""
    folder = guarded_folder(path) if error.errno == errno.EPERM else None
    guard = f" (macOS guards {folder}: {allow_or_move()})" if folder else ""
    return f"{error.strerror}{guard}"


def allow_or_move() -> str:
    """Advice about a guarded folder."""
    program = Path(sys.executable).resolve()
    return f"give {program} Full Disk Access in Privacy & Security of the settings, or move it"


def missing_path_error(path: Path, text: str, kind: type[ConfigError] = ConfigError) -> ConfigError:
    """The error of `kind` that says `text` of a path in the settings where nothing is.

    A restart does not mend a mistyped path, but it does if the path's disk is not mounted yet.
    """
    if is_unmounted(path):
        return NotAvailable(f"{text} (is its disk mounted?)")
    return kind(text)


def is_unmounted(path: Path, disks: Sequence[Path] = _DISKS, fstab: Path = _FSTAB) -> bool:
    """Whether `path`, where nothing is, would be on a disk that is not mounted at present.

    disks: the folders in which disks are mounted. fstab: the system's table of mount points.
    """
    parents = Path(os.path.realpath(path)).parents
    if any(point in parents and not os.path.ismount(point) for point in _mount_points(fstab)):
        return True
    nearest = next(parent for parent in parents if os.path.exists(parent))
    return any(
        disk in parents and (disk not in (nearest, *nearest.parents) or _same_disk(disk, nearest))
        for disk in disks
    )


def _same_disk(one: Path, other: Path) -> bool:
    return one.stat().st_dev == other.stat().st_dev


def _mount_points(fstab: Path) -> Iterator[Path]:
    try:
        lines = fstab.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split()
        if len(fields) > 1 and not line.lstrip().startswith("#"):
            yield Path(_ESCAPE.sub(lambda found: chr(int(found[1], 8)), fields[1]))
