"""Writes records to the disk store on a thread of its own, and goes on whatever the disk does."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue

import mlx.core as mx

from vlm_server.cache.disk.store import DiskStore, is_passing
from vlm_server.runner.disk.records import UNREADABLE, Record, read_header

logger = logging.getLogger(__name__)

_MAX_QUEUED_BYTES = 256 << 20
"""Of arrays that wait to be written: what is more is not stored, or the next time."""
_WARN_SECONDS = 3600.0
"""Between two warnings that files can't be written."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, slots=True)
class Job:
    """A record to write, and the keys of the blocks before it, without which it is useless."""

    key: str
    record: Record
    after: tuple[str, ...] = ()


class DiskWriter:
    """The only one that writes to `store`, though not to its folder. Thread-safe."""

    def __init__(self, store: DiskStore, on_gone: Callable[[Iterable[str]], None]) -> None:
        """`on_gone` is told of keys that were evicted, lost, or could not be written."""
        self._store = store
        self._on_gone = on_gone
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._sizes: dict[str, int] = {}
        """Of what waits to be written, by key."""
        self._warn_at = 0.0
        """When a failure to write is worth a warning again."""
        self._thread = threading.Thread(target=self._write_all, name="disk cache", daemon=True)
        self._thread.start()

    @property
    def room_bytes(self) -> int:
        """What may be added now."""
        with self._lock:
            return _MAX_QUEUED_BYTES - sum(self._sizes.values())

    @property
    def num_queued(self) -> int:
        with self._lock:
            return len(self._sizes)

    def __contains__(self, key: str) -> bool:
        """Whether it waits to be written."""
        with self._lock:
            return key in self._sizes

    def add(self, job: Job) -> None:
        """Returns at once."""
        with self._lock:
            self._sizes[job.key] = job.record.size_bytes
        self._queue.put(job)

    def close(self, seconds: float) -> None:
        """Write what waits, for `seconds` at most."""
        self._queue.put(None)
        self._thread.join(seconds)

    def _write_all(self) -> None:
        """Until `close`."""
        while (job := self._queue.get()) is not None:
            try:
                is_written = self._write(job)
            except Exception as error:  # noqa: BLE001 - requests go on without
                self._note_failure(error)
                is_written = False
            with self._lock:
                del self._sizes[job.key]
            if not is_written:
                self._on_gone([job.key])
        mx.clear_streams()

    def _write(self, job: Job) -> bool:
        """Whether there was room. Blocks are used after those that follow them, so that the ends of
        prompts are evicted first. What another engine has written meanwhile stays as it is."""
        if not all(key in self._store for key in job.after):
            return False
        gone = self._store.make_room(job.record.size_bytes, keep=job.after)
        if gone is None:
            return False
        self._on_gone(gone)
        if not self._is_stored(job) and not self._put(job):
            return False
        self._store.touch((job.key, *reversed(job.after)))
        return True

    def _is_stored(self, job: Job) -> bool:
        """Whether there is a file of just this; what is something else by its header is deleted."""
        path = self._store.path(job.key)
        if path is None:
            return False
        try:
            is_same = read_header(path) == job.record.header
        except UNREADABLE as error:
            is_same = is_passing(error)
        if not is_same:
            self._store.discard(job.key)
        return is_same

    def _put(self, job: Job) -> bool:
        """Whether there was room: on a full disk, older files make room once."""
        try:
            self._on_gone(self._store.put(job.key, job.record.write, job.after))
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._note_failure(error)
            gone = self._store.evict(job.record.size_bytes, keep=job.after)
            if gone is None:
                return False
            self._on_gone(gone)
            self._on_gone(self._store.put(job.key, job.record.write, job.after))
        return True

    def _note_failure(self, error: Exception) -> None:
        """Warn, but not for each file."""
        now = time.monotonic()
        level = logging.DEBUG
        if now >= self._warn_at:
            level, self._warn_at = logging.WARNING, now + _WARN_SECONDS
        if isinstance(error, OSError) and error.errno in _FULL:
            logger.log(level, "the disk of the cache is full: older files make room for newer ones")
        else:
            logger.log(level, "a cache file can't be written: %s", error)
