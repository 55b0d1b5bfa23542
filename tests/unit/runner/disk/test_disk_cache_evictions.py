"""The disk cache's index stays right while other threads evict and store."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_vlm.models.cache import KVCache

from tests.support.disk_writes import is_written, wait_until_written
from vlm_server.cache.disk.store import DiskStore
from vlm_server.cache.prompt_key import PromptKey
from vlm_server.runner.disk.disk_cache import DiskCache
from vlm_server.runner.kv.segments import SequenceState

OWNER = "0" * 64
_FILE_BYTES = 16_000
"""More than one of `state` has, and less than two."""


def prompt(first: int) -> PromptKey:
    return PromptKey(np.arange(first, first + 16, dtype=np.int32))


def state(value: float) -> SequenceState:
    """The KV of 16 tokens."""
    layer = KVCache()
    layer.update_and_fetch(mx.full((1, 2, 16, 40), value), mx.full((1, 2, 16, 40), value))
    return SequenceState([layer], {})


class WatchedStore(DiskStore):
    """Lets a test do something after an eviction, and before the file is written."""

    after_eviction: Callable[[], Any] = staticmethod(lambda: None)
    before_write: Callable[[], Any] = staticmethod(lambda: None)

    def make_room(self, size_bytes: int, keep: Collection[str] = ()) -> list[str] | None:
        gone = super().make_room(size_bytes, keep)
        if gone:
            self.after_eviction()
        return gone

    def put(self, key: str, write: Callable[[Path], None], keep: Collection[str] = ()) -> list[str]:
        self.before_write()
        return super().put(key, write, keep)


def wait_for(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def open_cache(store: DiskStore) -> DiskCache:
    return DiskCache(store, OWNER, lambda: 1 << 30, needs_snapshots=False)


def test_lowered_disk_limit_evicts_old_files_on_open(tmp_path: Path):
    cache = open_cache(DiskStore("disk", tmp_path, OWNER, 2 * _FILE_BYTES))
    for number in range(2):
        cache.store_prefix(prompt(100 * number), state(number), "")
    cache.close(10)
    again = open_cache(DiskStore("disk", tmp_path, OWNER, _FILE_BYTES))
    found = [again.find_prefix(prompt(100 * n), 0, 16, "", 0) is not None for n in range(2)]
    again.close(10)
    assert found == [False, True]


def test_prefix_stored_again_during_eviction_leaves_no_queued_write(tmp_path: Path):
    store = WatchedStore("disk", tmp_path, OWNER, 2 * _FILE_BYTES)
    cache = open_cache(store)

    def store_again() -> None:
        cache.store_prefix(prompt(0), state(0), "")

    def store_and_wait(number: int) -> None:
        cache.store_prefix(prompt(100 * number), state(number), "")
        wait_for(lambda: cache.find_prefix(prompt(100 * number), 0, 16, "", 0) is not None)

    store_and_wait(0)
    store_and_wait(1)
    wait_until_written(cache)
    store.after_eviction = store.before_write = store_again
    store_and_wait(2)
    store.after_eviction = store.before_write = lambda: None
    store_and_wait(3)
    cache.close(10)
    assert is_written(cache)
