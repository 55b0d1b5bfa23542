"""A folder that only its user can write to, for compiled code that is executed later.

MLX keeps the kernels that it compiles in `$TMPDIR/mlx`, and loads what it finds there: in a
folder that all users share, another user's library would run in the engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_NAME = "vlm-server-private"
LIBRARIES = "libraries"
"""The subfolder of links to libraries that engines load."""
_TEMPORARY = "tmp"
"""The subfolder that is engines' `$TMPDIR`."""
_KERNELS = "mlx"
"""In `$TMPDIR`, as MLX names it: compiled kernels."""
_LEFT_SECONDS = 86400.0
"""No load takes longer."""
_NOEXEC = getattr(os, "ST_NOEXEC", 0)


class PrivateFolder:
    """The user's private folder, in their cache folder, or a temporary one if that is not safe.

    `path` is to be called again before each use: the folder may have been removed, or replaced.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._own_kernels: Path | None = None
        """This daemon's own folder of kernels, once the shared one is not to be trusted."""
        self._cleanup = contextlib.ExitStack()
        """Removes the folders that are this daemon's alone."""

    def path(self) -> Path:
        """The folder; it exists. Raises OSError if none can be made."""
        try:
            return of_this_user()
        except (OSError, RuntimeError) as error:
            if self._folder is None:
                logger.warning("no private folder is kept between runs: %s", error)
        if self._folder is None or _flaw(self._folder) is not None:
            self.close()
            self._folder = self._new_folder("vlm-server-", None)
            lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            self._cleanup.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_SH)  # else `systemd-tmpfiles` may clean it up
        return _make_folder(self._folder.resolve())

    def environment(self) -> dict[str, str]:
        """Makes MLX keep its kernels here, for CPUs and for CUDA. Raises OSError."""
        folder = self.path()
        is_own = self._own_kernels is not None and self._own_kernels.parent == folder
        temporary = self._own_kernels if self._own_kernels and is_own else folder / _TEMPORARY
        _make(temporary)
        _sweep(temporary)
        return {"TMPDIR": str(temporary)}

    def forget_kernels(self) -> None:
        """Let the next engine compile its own kernels: a shared one may be cut short.

        The shared ones stay: other engines and daemons of this user may be using them.
        """
        self._own_kernels = self._new_folder("tmp-", self.path())

    def close(self) -> None:
        """Remove the folders that are this daemon's alone."""
        self._cleanup.close()
        self._folder = self._own_kernels = None

    def _new_folder(self, prefix: str, parent: Path | None) -> Path:
        folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
        return Path(self._cleanup.enter_context(folder))


def _sweep(folder: Path) -> None:
    """Remove the temporary files of killed engines; kernels stay."""
    oldest_time = time.time() - _LEFT_SECONDS
    for path in folder.glob("vlm-server-*"):
        with contextlib.suppress(OSError):  # another daemon does the same
            if path.lstat().st_mtime < oldest_time:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def of_this_user() -> Path:
    """The private folder that is kept between runs; it exists.

    Raises OSError if it can't be made or used, RuntimeError if there is no home.
    """
    caches = caches_folder(Path.home())
    caches.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _make_folder(caches.resolve() / _NAME)


def _make_folder(folder: Path) -> Path:
    """`folder`; it exists, as do those in it that code is executed from. Raises OSError."""
    for part in (folder, folder / LIBRARIES, folder / _TEMPORARY):
        _make(part)
    return folder


def _make(folder: Path) -> None:
    """Make it if it is not there. Raises OSError if nothing in it may be executed."""
    folder.mkdir(mode=0o700, exist_ok=True)
    flaw = _flaw(folder)
    if flaw is not None:
        raise OSError(f"{folder} {flaw}")
    if link := next(filter(Path.is_symlink, _tree(folder / _KERNELS)), None):
        raise OSError(f"{link} is a link")


def _tree(folder: Path) -> Iterator[Path]:
    yield folder
    for above, folders, files in os.walk(folder):
        yield from (Path(above, name) for name in (*folders, *files))


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file, or replace it as a whole; by default its owner's alone. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as new:
        try:
            os.fchmod(new.fileno(), mode)
            new.write(content)
            new.flush()
            os.fsync(new.fileno())
            os.replace(new.name, path)
        except BaseException:
            os.unlink(new.name)
            raise


def caches_folder(home: Path) -> Path:
    """Where a user's programs keep what they can make again; it may not exist yet."""
    if sys.platform == "darwin":
        return home / "Library/Caches"
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return folder if folder.is_absolute() else home / ".cache"


def _flaw(folder: Path) -> str | None:
    """Why nothing in `folder` may be executed; None if all is well. Raises OSError."""
    if not os.path.lexists(folder):
        return "is gone"
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "is not a folder"
    if status.st_uid != os.geteuid():
        return "belongs to another user"
    if status.st_mode & 0o077:
        return "is open to others"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "can't be written to"
    if os.statvfs(folder).f_flag & _NOEXEC:
        return "is mounted noexec"
    return next(
        (
            f"lies in {above}, which others may change"
            for above in folder.parents
            if _is_open(above.stat())
        ),
        None,
    )


def _is_open(folder: os.stat_result) -> bool:
    """Whether another user may replace its entries."""
    is_sticky = folder.st_mode & stat.S_ISVTX
    return folder.st_uid not in (0, os.geteuid()) or bool(
        folder.st_mode & stat.S_IWOTH and not is_sticky
    )
