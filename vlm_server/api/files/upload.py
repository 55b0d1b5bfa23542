"""A file that is being written: its bytes on disk, and their hash."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlm_server.errors import PayloadTooLarge, StorageFull

logger = logging.getLogger(__name__)


class Upload:
    """Writes the file `path`, which is new. Raises StorageFull."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path = path
        self.num_bytes = 0
        self.is_stored = False
        """Whether the file is kept: set by the store."""
        self._max_bytes = max_bytes
        self._hash = hashlib.sha256()
        with storage_errors():
            self._file = path.open("xb")

    def write(self, data: bytes) -> None:
        """Append `data`. Raises PayloadTooLarge beyond the largest size of a file."""
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise PayloadTooLarge(
                f"The file is larger than {self._max_bytes} bytes (files.max_file_bytes).", "file"
            )
        self._hash.update(data)
        with storage_errors():
            self._file.write(data)

    def finish(self, *, survives: bool) -> str:
        """End the file; returns the SHA-256 of its bytes. `survives`: a power failure, too."""
        with storage_errors():
            if survives and not self._file.closed:
                self._file.flush()
                os.fsync(self._file.fileno())
            self._file.close()
        return self._hash.hexdigest()

    def close(self) -> None:
        """Close the file, whatever happened."""
        with storage_errors():
            self._file.close()


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turns failures of the disk into StorageFull."""
    try:
        yield
    except OSError as error:
        logger.warning("an uploaded file can't be stored: %s", error.strerror)
        raise StorageFull("The server can't store the file: its disk is full or fails.") from None
