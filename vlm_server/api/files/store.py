"""Stored files: bounded in bytes, shared fairly by their owners, and each known to one of them.

An owner is the identity of an API key. Equal bytes of two owners are two files, so that nobody
finds out what others have uploaded.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from vlm_server.api.fair_turns import room_of
from vlm_server.api.files.folder import StoreFolder
from vlm_server.api.files.index import MEDIA, FileIndex, Live, StoredFile, new_id
from vlm_server.api.files.upload import Upload, storage_errors
from vlm_server.api.parsing.media.external import HASH_PREFIX
from vlm_server.errors import ConfigError, NotSupported, PayloadTooLarge, StorageFull
from vlm_server.settings import FileSettings
from vlm_server.settings.paths import expand_home

logger = logging.getLogger(__name__)

OVERHEAD_BYTES = 16 << 10
"""Bytes counted for a file in addition to its size."""
_INDEX = "index.sqlite"


class FileStore:
    """The files of all owners. Thread-safe; its methods use the disk, so call them from threads.

    A kept folder is opened at once, a temporary one by the first upload. `clock` returns seconds
    since 1970. Raises ConfigError if the folder of the settings can't be used.
    """

    def __init__(self, settings: FileSettings, clock: Callable[[], float] = time.time) -> None:
        self.limit_bytes = settings.max_bytes
        self.max_file_bytes = min(settings.max_file_bytes, settings.max_bytes)
        self.num_evicted = 0
        """The number of files dropped for lack of room."""
        self._max_age_seconds = settings.keep_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._sizes = Counter[str]()
        """Bytes by owner, overhead included."""
        self._num_files = 0
        self._folder: StoreFolder | None = None
        self._index: FileIndex | None = None
        self.kept_path = expand_home(settings.folder) if settings.folder else None
        if self.kept_path is not None and settings.max_bytes:
            try:
                self._open(self.kept_path)
            except (OSError, sqlite3.Error) as error:
                why = getattr(error, "strerror", None) or error
                path = str(self.kept_path)
                raise ConfigError(f"`files.folder` {path!r} can't be used: {why}") from None

    @property
    def path(self) -> Path:
        """The folder, for records that belong to files: names that begin as the index's are
        kept. Raises StorageFull."""
        with self._lock:
            return self._opened().path

    def __len__(self) -> int:
        return self._num_files

    @property
    def size_bytes(self) -> int:
        """Bytes of all files, overhead included."""
        return sum(tuple(self._sizes.values()))

    # ---- new files -----------------------------------------------------------------------

    @contextmanager
    def upload(self) -> Iterator[Upload]:
        """A new file, dropped after the `with` block unless it was added. Raises as `begin`."""
        upload = self.begin()
        try:
            yield upload
        finally:
            self.end(upload)

    def begin(self) -> Upload:
        """A new file to be written. Raises NotSupported if none is stored, and StorageFull."""
        if not self.limit_bytes:
            raise NotSupported("This server stores no files (files.max_bytes)")
        with self._lock:
            folder = self._opened().path
        return Upload(folder / secrets.token_hex(16), self.max_file_bytes)

    def end(self, upload: Upload) -> None:
        """Drop `upload`, unless it was added."""
        try:
            upload.close()
        finally:
            if not upload.is_stored:
                _unlink(upload.path)

    def add(
        self,
        owner: str,
        upload: Upload,
        filename: str,
        purpose: str,
        *,
        file_id: str | None = None,
        expires_after_seconds: int | None = None,
    ) -> StoredFile:
        """Keep `upload` under `file_id`, unless that is there; by default, under a new id.

        Raises PayloadTooLarge and StorageFull.
        """
        file_id = file_id or new_id()
        sha256, now = upload.finish(survives=self._is_kept), self._clock()
        file = StoredFile(
            file_id,
            owner,
            sha256,
            upload.num_bytes,
            filename,
            purpose,
            int(now),
            None if expires_after_seconds is None else int(now) + expires_after_seconds,
            now,
            upload.path.name,
        )
        with self._lock, _index_errors():
            if self._index is None:
                raise StorageFull("The server is stopping, or its folder of files is gone.")
            known = self._index.named(owner, file_id)
            if known is not None and known.used_at >= self._live.used_since:
                self._index.touch(known, now)
                return known
            if _cost(file) > room_of(owner, self._sizes, self.limit_bytes):
                raise PayloadTooLarge(
                    f"The file is larger than this key's share of the {self.limit_bytes} bytes for "
                    "files (files.max_bytes).",
                    "file",
                )
            if known is not None:
                self._drop(known)
            self._index.add(file)
            upload.is_stored = True
            self._count(file, 1)
            self._evict()
        return file

    def add_media(self, owner: str, upload: Upload) -> StoredFile:
        """Keep the bytes of `upload` under their hash, once for each owner. Raises as `add`."""
        name = f"{HASH_PREFIX}{upload.finish(survives=self._is_kept)}"
        return self.add(owner, upload, "", MEDIA, file_id=name)

    def _evict(self) -> None:
        """Drop files until the others fit: the oldest of the owner with the most bytes."""
        assert self._index is not None
        while self.size_bytes > self.limit_bytes:
            owner = max(self._sizes, key=self._sizes.__getitem__)
            self._drop(self._index.oldest(owner))
            self.num_evicted += 1

    # ---- stored files --------------------------------------------------------------------

    def find(self, owner: str, name: str) -> StoredFile | None:
        """The file of `owner` with that id or hash, now used; None if there is none."""
        with self._lock, _index_errors():
            if self._index is None:
                return None
            file = self._index.find(owner, name, self._live)
            if file is not None:
                self._index.touch(file, self._clock())
            return file

    def open(self, file: StoredFile) -> BinaryIO | None:
        """The bytes of `file`, or its lines, if iterated; None if it is gone.

        What is open stays readable when the file is deleted.
        """
        with self._lock:
            if self._folder is None:
                return None
            try:
                return (self._folder.path / file.path).open("rb")
            except FileNotFoundError:
                return None

    def read(self, file: StoredFile) -> bytes | None:
        """The bytes of `file`; None if it is gone. A damaged file, with other bytes, is dropped."""
        with storage_errors():
            reader = self.open(file)
            if reader is None:
                return None
            with reader:
                data = reader.read()
        if hashlib.sha256(data).hexdigest() == file.sha256:
            return data
        logger.error("a stored file is damaged, and dropped: %s", file.path)
        self.delete(file)
        return None

    def page(
        self,
        owner: str,
        *,
        purpose: str | None = None,
        after: str | None = None,
        limit: int,
        newest_first: bool = True,
    ) -> list[StoredFile]:
        """At most `limit` files of `owner` that have ids: those that follow `after`."""
        with self._lock, _index_errors():
            if self._index is None:
                return []
            return self._index.page(
                owner, self._live, purpose, after, limit, newest_first=newest_first
            )

    def delete(self, file: StoredFile) -> None:
        """Drop `file`, if it is there. Whoever reads it may go on."""
        with self._lock, _index_errors():
            self._drop(file)

    def drop_expired(self) -> None:
        """Drop the files that are too old."""
        with self._lock, _index_errors():
            if self._index is None:
                return
            for file in self._index.expired(self._live):
                self._drop(file)

    @property
    def _live(self) -> Live:
        now = self._clock()
        return Live(now - self._max_age_seconds, now)

    def _drop(self, file: StoredFile) -> None:
        if self._index is None or self._folder is None or not self._index.remove(file):
            return
        self._count(file, -1)
        _unlink(self._folder.path / file.path)

    def _count(self, file: StoredFile, sign: int) -> None:
        self._num_files += sign
        self._sizes[file.owner] += sign * _cost(file)
        if not self._sizes[file.owner]:
            del self._sizes[file.owner]

    # ---- the folder ----------------------------------------------------------------------

    def close(self) -> None:
        """Close the folder, or remove a temporary one. A later upload opens one again."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._index is not None:
            self._index.close()
        if self._folder is not None:
            self._folder.close()
        self._folder = self._index = None
        self._sizes.clear()
        self._num_files = 0

    @property
    def _is_kept(self) -> bool:
        return self._folder is not None and self._folder.is_kept

    def _opened(self) -> StoreFolder:
        """The folder, opened if need be: the first time, or since somebody has removed it."""
        if self._folder is not None and not self._folder.path.is_dir():
            logger.warning("the folder of uploaded files was removed, and is made again")
            self._close()
        if self._folder is None:
            with storage_errors(), _index_errors():
                self._open(self.kept_path)
        assert self._folder is not None
        return self._folder

    def _open(self, path: Path | None) -> None:
        folder = StoreFolder(path)
        try:
            self._index = FileIndex(folder.path / _INDEX, survives=folder.is_kept)
            self._folder = folder
            self._compare()
        except BaseException:
            self._folder = None
            folder.close()
            raise

    def _compare(self) -> None:
        """Drop records without their files, and files without records: what a crash has left."""
        assert self._folder is not None
        assert self._index is not None
        root = self._folder.path
        sizes = {path.name: path.stat().st_size for path in root.iterdir() if path.is_file()}
        for file in list(self._index):
            self._count(file, 1)
            if sizes.pop(file.path, None) != file.num_bytes:
                self._drop(file)
        for name in sizes:
            if not name.startswith(_INDEX):
                _unlink(root / name)
        self._evict()  # the settings may have changed


def _cost(file: StoredFile) -> int:
    return file.num_bytes + OVERHEAD_BYTES


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("an uploaded file can't be deleted: %s: %s", path, error.strerror)


@contextmanager
def _index_errors() -> Iterator[None]:
    """Turns failures of the index into StorageFull."""
    try:
        yield
    except sqlite3.Error as error:
        logger.warning("the index of uploaded files failed: %s", error)
        text = "The server can't use its index of files: its disk is full or fails."
        raise StorageFull(text) from None
