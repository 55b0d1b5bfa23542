"""A disk store stays usable and correct while one thread deletes or reads a file."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.integrity import check_integrity
from tests.unit.cache.disk_entries import OWNER, content_of, key_of, write
from vlm_server.cache.disk.files import temporary_name
from vlm_server.cache.disk.store import DiskStore

SECONDS = 20.0


class BusyPath(type(Path())):  # type: ignore[misc]
    """A path that says when it is used, and waits for the answer."""

    on_unlink: Callable[[Path], object] | None = None
    on_read: Callable[[Path], object] | None = None

    def unlink(self, missing_ok: bool = False) -> None:
        work, BusyPath.on_unlink = BusyPath.on_unlink, None
        if work:
            work(self)
        super().unlink(missing_ok)

    def read_bytes(self) -> bytes:
        work, BusyPath.on_read = BusyPath.on_read, None
        if work:
            work(self)
        data: bytes = super().read_bytes()
        return data


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    """A store with room for three files of 100 bytes."""
    store = DiskStore("disk", BusyPath(tmp_path), OWNER, 300)
    yield store
    BusyPath.on_unlink = BusyPath.on_read = None
    check_integrity(store)


def put(store: DiskStore, number: int, content: bytes | None = None) -> None:
    assert store.make_room(100) is not None
    store.put(key_of(number), lambda path: write(path, content or content_of(number)))


def run_on_other_thread(work: Callable[[], Any]) -> Any:
    """The result of `work` on another thread. Raises TimeoutError if it does not end."""
    threads = ThreadPoolExecutor(1)
    try:
        return threads.submit(work).result(SECONDS)
    finally:
        threads.shutdown(wait=False)


def test_eviction_does_not_block_other_threads(store: DiskStore) -> None:
    for number in (1, 2, 3):
        put(store, number)
    results = list[object]()

    def look(path: Path) -> None:
        results.append(run_on_other_thread(lambda: (store.get(key_of(2)), store.get(key_of(1)))))

    BusyPath.on_unlink = look
    assert store.make_room(100) == [key_of(1)]
    assert results == [(content_of(2), None)]


def test_deletion_of_damaged_file_does_not_block_other_threads(store: DiskStore) -> None:
    put(store, 1)
    put(store, 2)
    store.paths[key_of(1)].write_bytes(b"something else")
    results = list[object]()
    BusyPath.on_unlink = lambda path: results.append(
        run_on_other_thread(lambda: store.get(key_of(2)))
    )
    assert store.get(key_of(1)) is None
    assert results == [content_of(2)]
    assert (store.stats().damaged, store.stats().misses) == (1, 1)


def test_file_evicted_just_before_its_read_is_miss(store: DiskStore) -> None:
    put(store, 1)
    BusyPath.on_read = lambda path: run_on_other_thread(lambda: store.make_room(300))
    assert store.get(key_of(1)) is None
    assert (store.stats().damaged, store.stats().evictions, store.stats().misses) == (0, 1, 1)


def test_file_replaced_just_before_its_read_is_kept(store: DiskStore) -> None:
    put(store, 1)

    def replace(path: Path) -> None:
        assert store.make_room(300) == [key_of(1)]
        put(store, 1, content_of(7))

    BusyPath.on_read = lambda path: run_on_other_thread(lambda: replace(path))
    assert store.get(key_of(1)) is None
    assert store.stats().damaged == 0
    assert store.get(key_of(1)) == content_of(7)


def test_rewrite_waits_for_deletion_of_damaged_file_and_stays(store: DiskStore) -> None:
    put(store, 1)
    store.paths[key_of(1)].write_bytes(b"something else")
    writer: list[threading.Thread] = []

    def write_again(path: Path) -> None:
        writer.append(threading.Thread(target=put, args=(store, 1)))
        writer[0].start()
        writer[0].join(0.2)
        assert writer[0].is_alive(), "it waits for the deletion of a file of the same name"

    BusyPath.on_unlink = write_again
    assert store.get(key_of(1)) is None
    writer[0].join(SECONDS)
    assert store.get(key_of(1)) == content_of(1)


def test_undeletable_file_still_counts_towards_size(store: DiskStore) -> None:
    for number in (1, 2):
        put(store, number)

    def fail(path: Path) -> None:
        raise PermissionError

    BusyPath.on_unlink = fail
    with pytest.raises(PermissionError):
        store.make_room(200)
    assert (store.stats().size_bytes, store.get(key_of(1))) == (200, content_of(1))
    assert store.make_room(200) == [key_of(1)]


@pytest.mark.usefixtures("eager_switches")
def test_temporary_file_that_vanishes_during_start_is_ignored(tmp_path: Path) -> None:
    """The disk is full, say, and it deletes what it has written so far."""

    class VanishingPath(type(Path())):  # type: ignore[misc]
        def lstat(self) -> os.stat_result:
            if self.name.startswith("tmp-"):
                self.unlink()
            return super().lstat()

    DiskStore("disk", tmp_path, OWNER, 300)
    (tmp_path / OWNER / temporary_name(key_of(1), 1)).touch()
    store = DiskStore("disk", VanishingPath(tmp_path), OWNER, 300)
    put(store, 3)
    assert key_of(3) in store


def test_concurrent_writer_and_readers_keep_store_intact(store: DiskStore) -> None:
    is_written = threading.Event()

    def write_all() -> None:
        choice = random.Random(0)
        for _ in range(150):
            put(store, choice.randrange(6))
        is_written.set()

    def read_all(seed: int) -> None:
        choice = random.Random(seed)
        while not is_written.is_set():
            number = choice.randrange(6)
            assert store.get(key_of(number)) in (None, content_of(number))
            store.touch([key_of(number)])
            if choice.random() < 0.1:
                store.discard(key_of(number))
            store.stats()

    with ThreadPoolExecutor(4) as threads:
        readers = [threads.submit(read_all, seed) for seed in range(3)]
        threads.submit(write_all).result(SECONDS * 3)
        for reader in readers:
            reader.result(SECONDS)
    check_integrity(store)
