"""The folder of stored files, for one daemon and its user alone: kept, or temporary."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

_PREFIX = "vlm-server-files-"
_YOUNG_SECONDS = 60.0
"""A temporary folder that is younger may be about to be locked."""


class StoreFolder:
    """A folder that is locked while it is open. Raises OSError if it can't be used.

    path: absolute, made if it is not there; None for a temporary folder, which `close` removes.
    """

    def __init__(self, path: Path | None) -> None:
        self.is_kept = path is not None
        if path is None:
            _remove_abandoned()
            path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        else:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _check_private(self._descriptor)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            os.close(self._descriptor)
            if isinstance(error, BlockingIOError):
                raise OSError("another daemon uses it") from None
            raise

    def close(self) -> None:
        """Unlock the folder, or remove a temporary one."""
        if not self.is_kept:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def _check_private(descriptor: int) -> None:
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        raise OSError("it belongs to another user")
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise OSError("it is open to other users: run chmod 700 on it")


def _remove_abandoned() -> None:
    """Remove temporary folders of daemons that were killed."""
    oldest_time = time.time() - _YOUNG_SECONDS
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or locked
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                _check_private(descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_mtime < oldest_time:
                    shutil.rmtree(path)
            finally:
                os.close(descriptor)
