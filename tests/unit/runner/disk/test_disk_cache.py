"""Changes to the folder by other processes, or lack of memory, cost only stored entries."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

import mlx.core as mx
import numpy as np
import pytest
from mlx_vlm.models.cache import KVCache

from tests.support.disk_writes import is_written, wait_until_written
from vlm_server.cache.disk.store import DiskStore
from vlm_server.cache.kv_storage import EXACT, KVStorage
from vlm_server.cache.prompt_key import PromptKey
from vlm_server.runner.disk import records
from vlm_server.runner.disk.disk_cache import DiskCache
from vlm_server.runner.kv.segments import KVSegment, LayerStates, SequenceState

OWNER = "a" * 64
LOTS = 1 << 20


class Store(DiskStore):
    """Writes while `may_write`; calls `meanwhile` after reading other processes' changes."""

    def __init__(self, folder: Path) -> None:
        self.may_write = threading.Event()
        self.may_write.set()
        self.meanwhile: Callable[[], None] = lambda: None
        super().__init__("disk", folder, OWNER, LOTS)

    def put(self, key: str, write: Callable[[Path], None], keep: Collection[str] = ()) -> list[str]:
        self.may_write.wait()
        return super().put(key, write, keep)

    def refresh(self) -> tuple[list[str], list[str]]:
        told = super().refresh()
        self.meanwhile()
        return told


def store(cache: DiskCache, token_ids: list[int], storage: KVStorage = EXACT) -> KVSegment:
    """Store random KV; returns it as it should be read."""
    layer = KVCache()
    layer.update_and_fetch(*(mx.random.normal((1, 2, len(token_ids), 8)) for _ in range(2)))
    state = SequenceState([layer], {}).stored_as(storage)
    cache.store_prefix(key_of(token_ids), state, "")
    return state.take(0, len(token_ids))


def key_of(token_ids: list[int]) -> PromptKey:
    return PromptKey(np.array(token_ids, dtype=np.int32))


def is_found(cache: DiskCache, token_ids: list[int]) -> bool:
    return cache.find_prefix(key_of(token_ids), 0, len(token_ids), "", 1) is not None


def test_block_stored_again_during_eviction_notice_is_found(tmp_path: Path):
    files = Store(tmp_path)
    cache = DiskCache(files, "fingerprint", lambda: LOTS, needs_snapshots=False)
    store(cache, [1, 2, 3])
    wait_until_written(cache)
    DiskStore("disk", tmp_path, OWNER, LOTS).evict(LOTS)
    files.may_write.clear()
    files.meanwhile = lambda: store(cache, [1, 2, 3])
    assert not is_found(cache, [1, 2, 3])
    files.meanwhile = lambda: None
    store(cache, [1, 2, 3])
    files.may_write.set()
    store(cache, [4, 5, 6])
    wait_until_written(cache)
    assert is_found(cache, [1, 2, 3])
    assert is_found(cache, [4, 5, 6])
    cache.close(10)


def test_failed_header_read_of_another_engines_file_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_memory(_: Path) -> NoReturn:
        raise MemoryError

    one, other = (
        DiskCache(Store(tmp_path), "fingerprint", lambda: LOTS, needs_snapshots=False)
        for _ in range(2)
    )
    store(one, [1, 2, 3])
    wait_until_written(one)
    with monkeypatch.context() as patch:
        patch.setattr(records, "read_header", no_memory)
        assert not is_found(other, [1, 2, 3])
    assert is_found(one, [1, 2, 3])


@pytest.mark.parametrize("header", [b"{}", b'{"__metadata__":{"vlm_server":5}}', b"[]"])
def test_file_with_another_header_is_deleted(tmp_path: Path, header: bytes):
    name = f"prefix-{'b' * 64}-{'c' * 64}.safetensors"
    (tmp_path / OWNER).mkdir()
    (tmp_path / OWNER / name).write_bytes(len(header).to_bytes(8, "little") + header)
    cache = DiskCache(Store(tmp_path), "fingerprint", lambda: LOTS, needs_snapshots=False)
    assert not (tmp_path / OWNER / name).exists()
    cache.close(10)


def test_storing_failed_snapshot_raises_on_calling_thread(tmp_path: Path):
    """The computing thread gets the error of a failed snapshot, not the disk's thread."""
    failing = mx.linalg.inv(mx.zeros((2, 2)), stream=mx.cpu)  # type: ignore[arg-type]
    state = SequenceState([], {3: LayerStates(((failing, None),), ((),))})
    cache = DiskCache(Store(tmp_path), "fingerprint", lambda: LOTS, needs_snapshots=True)
    with pytest.raises(RuntimeError, match="factorization"):
        cache.store_prefix(key_of([1, 2, 3]), state, "")
    assert is_written(cache)
    cache.close(10)


def test_kv_of_other_bits_is_never_found_and_own_is_read_as_written(tmp_path: Path):
    """Engines with other settings share the folder: each finds its own blocks, and keeps all."""
    storages = [EXACT, KVStorage(8), KVStorage(4), KVStorage(8, group_size=8)]
    caches = [
        DiskCache(Store(tmp_path), "f", lambda: LOTS, needs_snapshots=False, kv_storage=storage)
        for storage in storages
    ]
    for cache, storage in zip(caches, storages, strict=True):
        assert not is_found(cache, [1, 2, 3])
        written = store(cache, [1, 2, 3], storage)
        wait_until_written(cache)
        (block,) = cache.read_prefix(key_of([1, 2, 3]), 0, 3, "")
        read = block.take(0, 3)
        assert block.size_bytes(0, 3) == read.size_bytes == written.size_bytes
        for array, expected in zip(read.arrays, written.arrays, strict=True):
            assert array.dtype == expected.dtype
            assert mx.array_equal(array, expected)
    assert len(list((tmp_path / OWNER).iterdir())) == len(storages)
    for cache in caches:
        assert is_found(cache, [1, 2, 3])
        cache.close(10)
