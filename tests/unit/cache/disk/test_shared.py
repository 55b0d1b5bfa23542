"""Stores of several processes in one folder share their entries and one limit."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.integrity import check_integrity
from tests.unit.cache.disk_entries import (
    OTHER,
    OWNER,
    WRITER,
    all_files,
    content_of,
    key_of,
    numbers_in,
    open_store,
    put,
)
from vlm_server.cache.disk import folder as disk_folder
from vlm_server.cache.disk import folder as shared_folder
from vlm_server.cache.disk.files import temporary_name
from vlm_server.cache.disk.folder import FolderLock
from vlm_server.cache.disk.store import DiskStore

LIMIT_BYTES = 300
"""Room for three files."""


@pytest.fixture
def one_store(tmp_path: Path) -> DiskStore:
    return DiskStore("disk", tmp_path, OWNER, LIMIT_BYTES)


@pytest.fixture
def other_store(one_store: DiskStore, tmp_path: Path) -> DiskStore:
    """A second store in the same folder."""
    return DiskStore("disk", tmp_path, OWNER, LIMIT_BYTES)


def writes(number: int, size_bytes: int = 100) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(content_of(number, size_bytes)), None)[1]


def test_entry_of_another_process_is_found_after_refresh(
    one_store: DiskStore, other_store: DiskStore
) -> None:
    put(one_store, 1)
    assert other_store.get(key_of(1)) is None
    assert other_store.refresh() == ([key_of(1)], [])
    assert other_store.refresh() == ([], [])
    assert other_store.get(key_of(1)) == content_of(1, 100)
    put(other_store, 2)
    assert one_store.refresh() == ([key_of(2)], [])
    assert (one_store.stats().size_bytes, other_store.stats().size_bytes) == (200, 200)
    check_integrity(one_store)
    check_integrity(other_store)


def test_refresh_lists_folder_only_after_foreign_changes(
    one_store: DiskStore, other_store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings = list[object]()
    list_names = disk_folder.list_names
    monkeypatch.setattr(
        disk_folder, "list_names", lambda path: (listings.append(path), list_names(path))[1]
    )
    other_store.refresh()
    listings.clear()
    for number in range(5):
        put(other_store, number)
        other_store.refresh()
    assert not listings
    one_store.refresh()
    one_store.refresh()
    assert len(listings) == 1


def test_refresh_lists_again_once_old_listings_have_expired(
    one_store: DiskStore, other_store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may keep a listing for so long."""
    put(one_store, 1)
    real, list_names = disk_folder.time.monotonic, disk_folder.list_names
    monkeypatch.setattr(disk_folder, "list_names", lambda path: {})
    assert other_store.refresh() == ([], [])
    monkeypatch.setattr(disk_folder, "list_names", list_names)
    assert other_store.refresh() == ([], [])
    monkeypatch.setattr(disk_folder.time, "monotonic", lambda: real() + 61)
    assert other_store.refresh() == ([key_of(1)], [])


def test_touch_by_another_process_delays_eviction(
    one_store: DiskStore, other_store: DiskStore
) -> None:
    for number in (1, 2, 3):
        put(one_store, number)
    other_store.refresh()
    other_store.touch([key_of(1)])
    assert one_store.make_room(100) == [key_of(2)]
    other_store.touch([key_of(3)])
    assert one_store.make_room(200) == [key_of(1)]
    assert one_store.stats().evictions == 2
    check_integrity(one_store)


def test_entry_evicted_by_another_process_is_miss(
    one_store: DiskStore, other_store: DiskStore
) -> None:
    put(one_store, 1)
    other_store.make_room(LIMIT_BYTES)
    assert one_store.get(key_of(1)) is None
    assert (one_store.stats().misses, one_store.stats().damaged, one_store.stats().entries) == (
        1,
        0,
        0,
    )
    put(one_store, 1)
    assert one_store.get(key_of(1)) == content_of(1, 100)
    check_integrity(other_store)


def test_file_can_be_evicted_while_it_is_read(
    one_store: DiskStore, other_store: DiskStore, tmp_path: Path
) -> None:
    put(one_store, 1, 300)
    with one_store.paths[key_of(1)].open("rb") as file:
        begun = file.read(10)
        assert other_store.make_room(LIMIT_BYTES) == [key_of(1)]
        assert all_files(tmp_path) == []
        assert begun + file.read() == content_of(1, 300)


def test_shared_folder_has_one_limit_for_all_stores(
    one_store: DiskStore, other_store: DiskStore, tmp_path: Path
) -> None:
    put(one_store, 1)
    put(other_store, 2)
    assert one_store.make_room(100) == []
    assert other_store.make_room(100) == []
    other_store.put(key_of(3), writes(3))
    assert one_store.put(key_of(4), writes(4), keep=[key_of(1)]) == [key_of(2)]
    assert sum(path.stat().st_size for path in all_files(tmp_path)) == LIMIT_BYTES
    assert numbers_in(one_store) == {1, 3, 4}
    third = DiskStore("disk", tmp_path, OTHER, LIMIT_BYTES)
    put(third, 5)
    check_integrity(third)
    assert one_store.refresh()[1] == [key_of(1)]


def test_second_writer_of_file_does_nothing(
    one_store: DiskStore, other_store: DiskStore, tmp_path: Path
) -> None:
    def write(path: Path) -> None:
        path.write_bytes(b"half")
        assert other_store.put(key_of(1), writes(1)) == []
        assert key_of(1) not in other_store
        assert path.read_bytes() == b"half"
        path.write_bytes(content_of(1, 100))

    one_store.put(key_of(1), write)
    assert other_store.refresh() == ([key_of(1)], [])
    assert other_store.get(key_of(1)) == content_of(1, 100)
    assert len(all_files(tmp_path)) == 1


def test_file_stored_by_another_process_is_not_overwritten(
    one_store: DiskStore, other_store: DiskStore, tmp_path: Path
) -> None:
    put(other_store, 1)
    one_store.put(key_of(1), writes(7))  # it does not know yet
    assert one_store.get(key_of(1)) == content_of(1, 100)
    assert len(all_files(tmp_path)) == 1
    check_integrity(one_store)


def test_unfinished_file_of_live_writer_is_not_swept(one_store: DiskStore, tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_bytes(b"half")
        with open_store(tmp_path):
            assert path.read_bytes() == b"half"
        path.write_bytes(content_of(1, 100))

    put(one_store, 2)
    one_store.put(key_of(1), write)
    assert numbers_in(one_store) == {1, 2}
    check_integrity(one_store)


def test_writer_killed_before_rename_leaves_only_whole_files(
    one_store: DiskStore, tmp_path: Path
) -> None:
    """The writer is killed between write and rename."""
    put(one_store, 1)
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    while not list(tmp_path.rglob("tmp-*")):
        assert process.poll() is None
    process.kill()
    process.wait()
    process.stdout.close()
    one_store.refresh()
    assert all(one_store.get(key) is not None for key in one_store.paths)
    assert one_store.stats().damaged == 0
    put(one_store, 2)
    check_integrity(one_store)
    key = key_of(3)
    (tmp_path / OWNER / temporary_name(key, process.pid)).write_bytes(b"half")
    put(one_store, 3)
    assert one_store.get(key) == content_of(3, 100)
    with open_store(tmp_path):
        assert not list(tmp_path.rglob("tmp-*"))


def test_changes_of_process_that_died_with_lock_are_found(
    one_store: DiskStore, other_store: DiskStore, tmp_path: Path
) -> None:
    """The process died between the rename and the new token."""
    put(one_store, 1)
    other_store.refresh()
    put(one_store, 2)
    (tmp_path / "lock").write_text("0" * 32)
    assert other_store.refresh() == ([key_of(2)], [])
    one_store.paths[key_of(1)].unlink()
    assert other_store.refresh() == ([], [key_of(1)])
    put(other_store, 3)
    assert one_store.refresh() == ([key_of(3)], [key_of(1)])
    assert FolderLock(tmp_path).token


def test_lock_held_forever_stops_writes_but_not_reads(
    one_store: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an older version did, which did not share its folder."""
    monkeypatch.setattr(shared_folder, "_TURN_WAIT_SECONDS", 0.05)
    put(one_store, 1)
    held = os.open(tmp_path / "lock", os.O_RDWR)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError):
            one_store.make_room(100)
        with pytest.raises(TimeoutError):
            DiskStore("disk", tmp_path, OWNER, LIMIT_BYTES)
        one_store.refresh()
        assert one_store.get(key_of(1)) == content_of(1, 100)
    finally:
        os.close(held)
    assert put(one_store, 2)
    check_integrity(one_store)


HAMMER = """
import random, sys
from pathlib import Path
from tests.unit.cache.disk_entries import OWNER, content_of, key_of, put
from vlm_server.cache.disk.store import DiskStore

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
choice = random.Random(seed)
store = DiskStore("disk", folder, OWNER, 1000)
hits = 0
for _ in range(50):
    number = choice.randrange(20)
    if key_of(number) not in store:
        put(store, number, 50 + 10 * number, keep=(choice.randrange(20),))
    number = choice.randrange(20)
    content = store.get(key_of(number))
    assert content in (None, content_of(number, 50 + 10 * number))
    hits += content is not None
    store.touch([key_of(number)])
    store.refresh()
    if choice.random() < 0.05:
        store.discard(key_of(number))
print(hits, store.stats().evictions)
"""


def test_concurrent_processes_keep_shared_folder_intact(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        pass
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", HAMMER, str(tmp_path), str(seed)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(3)
    ]
    while any(process.poll() is None for process in processes):
        time.sleep(0.05)
        with FolderLock(tmp_path).turn():
            names = [path for path in all_files(tmp_path) if not path.name.startswith("tmp-")]
            assert sum(path.stat().st_size for path in names if path.exists()) <= 1000
    counts = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert all(int(hits) > 0 and int(evictions) > 0 for hits, evictions in counts)
    store.refresh()
    check_integrity(store)
    for key in store.paths:
        number = int(key.partition("-")[2], 16)
        assert store.get(key) == content_of(number, 50 + 10 * number)
    assert store.stats().damaged == 0
    assert not list(tmp_path.rglob("tmp-*"))
