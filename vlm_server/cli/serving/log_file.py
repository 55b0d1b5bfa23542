"""A log file of bounded size that all processes of the daemon write to."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import BinaryIO

from vlm_server.errors import ConfigError

MAX_BYTES = 10 << 20
NUM_OLDER = 3


class LogFile:
    """Standard output and standard error, of this process and its children, go to `path`.

    It is emptied once it is larger than `max_bytes`; what it held is then in `path.1`, and before
    that in `path.2` and so on: launchd does not rotate logs, and newsyslog needs root. The file is
    not replaced: children hold it open, at its end, wherever that is. A line that is written while
    it is copied may be lost.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, num_older: int = NUM_OLDER) -> None:
        """Raises ConfigError if the file can't be written."""
        self._path = path
        self._max_bytes = max_bytes
        self._num_older = num_older
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"can't write {path}: {error.strerror}") from None
        sys.stdout.flush()
        for descriptor in (1, 2):
            os.dup2(file, descriptor)
        os.close(file)

    def rotate_if_large(self) -> None:
        """Start the file anew if it is large. What fails is tried again the next time."""
        with contextlib.suppress(OSError):
            if os.path.getsize(self._path) > self._max_bytes:
                self._rotate()

    def _rotate(self) -> None:
        draft = self._path.with_name(f".{self._path.name}.draft")
        with self._path.open("rb") as old, _private(draft) as new:
            shutil.copyfileobj(old, new)
        for number in range(self._num_older, 1, -1):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._older(number - 1), self._older(number))
        draft.replace(self._older(1))
        os.truncate(self._path, 0)

    def _older(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _private(path: Path) -> BinaryIO:
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    return path.open("wb")
