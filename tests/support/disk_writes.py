"""Waits for the writes of a disk cache."""

from __future__ import annotations

import time

from vlm_server.runner.disk.disk_cache import DiskCache
from vlm_server.runner.disk.disk_writer import MAX_QUEUED_BYTES


def is_written(cache: DiskCache) -> bool:
    """Whether nothing waits for the disk."""
    return cache.writer.room_bytes == MAX_QUEUED_BYTES


def wait_until_written(cache: DiskCache, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not is_written(cache):
        assert time.monotonic() < deadline
        time.sleep(0.01)
