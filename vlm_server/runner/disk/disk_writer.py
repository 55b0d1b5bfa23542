"""The thread that writes records to the disk store; no fault of the disk ends it."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue

import mlx.core as mx

from vlm_server.cache.disk.store import DiskStore, is_transient
from vlm_server.runner.disk.records import UNREADABLE, Record, read_header

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 256 << 20
"""Limit of the queue; records beyond it are dropped."""
_WARN_SECONDS = 3600.0
"""Minimum time between two warnings of failed writes."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class WriteJob:
    """A record to write. `after`: keys of the blocks before it, which it needs."""

    key: str
    record: Record
    after: tuple[str, ...] = ()


class DiskWriter:
    """This process's only writer of `store`. Thread-safe."""

    def __init__(self, store: DiskStore, on_gone: Callable[[Iterable[str]], None]) -> None:
        """on_gone: called with keys that were evicted, lost, or could not be written."""
        self._store = store
        self._on_gone = on_gone
        self._lock = threading.Lock()
        self._queue: SimpleQueue[WriteJob | None] = SimpleQueue()
        self._sizes: dict[str, int] = {}
        """Bytes of records in the queue, by key."""
        self._warn_at = 0.0
        """Earliest time of the next warning, by `time.monotonic`."""
        self._thread = threading.Thread(target=self._write_all, name="disk cache", daemon=True)
        self._thread.start()

    @property
    def room_bytes(self) -> int:
        """Free bytes of the queue."""
        with self._lock:
            return MAX_QUEUED_BYTES - sum(self._sizes.values())

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._sizes

    def add(self, job: WriteJob) -> None:
        with self._lock:
            self._sizes[job.key] = job.record.size_bytes
        self._queue.put(job)

    def close(self, seconds: float) -> None:
        """Write the queue, for `seconds` at most."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _write_all(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                is_written = self._write(job)
            except Exception as error:  # noqa: BLE001 - no request may fail
                self._log_failure(error)
                is_written = False
            with self._lock:
                del self._sizes[job.key]
            if not is_written:
                self._on_gone([job.key])
        mx.clear_streams()

    def _write(self, job: WriteJob) -> bool:
        """Write a record; returns whether there was room.

        Touches earlier blocks last, so that the ends of prompts are evicted first. A file that
        another engine has written in the meantime stays.
        """
        if not all(key in self._store for key in job.after):
            return False
        if (gone := self._store.make_room(job.record.size_bytes, keep=job.after)) is None:
            return False
        self._on_gone(gone)
        if not self._is_stored(job) and not self._put(job):
            return False
        self._store.touch((job.key, *reversed(job.after)))
        return True

    def _is_stored(self, job: WriteJob) -> bool:
        """Whether the record's file exists; a file with another header is deleted."""
        if (path := self._store.path(job.key)) is None:
            return False
        try:
            is_same = read_header(path) == job.record.header
        except UNREADABLE as error:
            is_same = is_transient(error)
        if not is_same:
            self._store.discard(job.key)
        return is_same

    def _put(self, job: WriteJob) -> bool:
        """Write the file; returns whether there was room. Evicts and retries on a full disk."""
        try:
            self._on_gone(self._store.put(job.key, job.record.write, job.after))
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._log_failure(error)
            if (gone := self._store.evict(job.record.size_bytes, keep=job.after)) is None:
                return False
            self._on_gone(gone)
            self._on_gone(self._store.put(job.key, job.record.write, job.after))
        return True

    def _log_failure(self, error: Exception) -> None:
        """Log a failure, as a warning at most once in `_WARN_SECONDS`."""
        now, level = time.monotonic(), logging.DEBUG
        if now >= self._warn_at:
            level, self._warn_at = logging.WARNING, now + _WARN_SECONDS
        if isinstance(error, OSError) and error.errno in _FULL:
            logger.log(level, "the disk of the cache is full: older files make room for newer ones")
        else:
            logger.log(level, "a cache file can't be written: %s", error)
