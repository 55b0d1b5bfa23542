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
def one(tmp_path: Path) -> DiskStore:
    return DiskStore("disk", tmp_path, OWNER, LIMIT_BYTES)


@pytest.fixture
def other(one: DiskStore, tmp_path: Path) -> DiskStore:
    """A second store in the same folder."""
    return DiskStore("disk", tmp_path, OWNER, LIMIT_BYTES)


def writes(number: int, size_bytes: int = 100) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(content_of(number, size_bytes)), None)[1]


def test_entry_of_another_process_is_found_after_refresh(one: DiskStore, other: DiskStore) -> None:
    put(one, 1)
    assert other.get(key_of(1)) is None
    assert other.refresh() == ([key_of(1)], [])
    assert other.refresh() == ([], [])
    assert other.get(key_of(1)) == content_of(1, 100)
    put(other, 2)
    assert one.refresh() == ([key_of(2)], [])
    assert (one.stats().size_bytes, other.stats().size_bytes) == (200, 200)
    one.check_integrity()
    other.check_integrity()


def test_refresh_lists_folder_only_after_foreign_changes(
    one: DiskStore, other: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    listings = list[object]()
    list_names = disk_folder.list_names
    monkeypatch.setattr(
        disk_folder, "list_names", lambda path: (listings.append(path), list_names(path))[1]
    )
    other.refresh()
    listings.clear()
    for number in range(5):
        put(other, number)
        other.refresh()
    assert not listings
    one.refresh()
    one.refresh()
    assert len(listings) == 1


def test_refresh_lists_again_once_old_listings_have_expired(
    one: DiskStore, other: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may keep a listing for so long."""
    put(one, 1)
    real, list_names = disk_folder.time.monotonic, disk_folder.list_names
    monkeypatch.setattr(disk_folder, "list_names", lambda path: {})
    assert other.refresh() == ([], [])
    monkeypatch.setattr(disk_folder, "list_names", list_names)
    assert other.refresh() == ([], [])
    monkeypatch.setattr(disk_folder.time, "monotonic", lambda: real() + 61)
    assert other.refresh() == ([key_of(1)], [])


def test_touch_by_another_process_delays_eviction(one: DiskStore, other: DiskStore) -> None:
    for number in (1, 2, 3):
        put(one, number)
    other.refresh()
    other.touch([key_of(1)])
    assert one.make_room(100) == [key_of(2)]
    other.touch([key_of(3)])
    assert one.make_room(200) == [key_of(1)]
    assert one.stats().evictions == 2
    one.check_integrity()


def test_entry_evicted_by_another_process_is_miss(one: DiskStore, other: DiskStore) -> None:
    put(one, 1)
    other.make_room(LIMIT_BYTES)
    assert one.get(key_of(1)) is None
    assert (one.stats().misses, one.stats().damaged, one.stats().entries) == (1, 0, 0)
    put(one, 1)
    assert one.get(key_of(1)) == content_of(1, 100)
    other.check_integrity()


def test_file_can_be_evicted_while_it_is_read(
    one: DiskStore, other: DiskStore, tmp_path: Path
) -> None:
    put(one, 1, 300)
    with one.paths[key_of(1)].open("rb") as file:
        begun = file.read(10)
        assert other.make_room(LIMIT_BYTES) == [key_of(1)]
        assert all_files(tmp_path) == []
        assert begun + file.read() == content_of(1, 300)


def test_shared_folder_has_one_limit_for_all_stores(
    one: DiskStore, other: DiskStore, tmp_path: Path
) -> None:
    put(one, 1)
    put(other, 2)
    assert one.make_room(100) == []
    assert other.make_room(100) == []
    other.put(key_of(3), writes(3))
    assert one.put(key_of(4), writes(4), keep=[key_of(1)]) == [key_of(2)]
    assert sum(path.stat().st_size for path in all_files(tmp_path)) == LIMIT_BYTES
    assert numbers_in(one) == {1, 3, 4}
    third = DiskStore("disk", tmp_path, OTHER, LIMIT_BYTES)
    put(third, 5)
    third.check_integrity()
    assert one.refresh()[1] == [key_of(1)]


def test_second_writer_of_file_does_nothing(
    one: DiskStore, other: DiskStore, tmp_path: Path
) -> None:
    def write(path: Path) -> None:
        path.write_bytes(b"half")
        assert other.put(key_of(1), writes(1)) == []
        assert key_of(1) not in other
        assert path.read_bytes() == b"half"
        path.write_bytes(content_of(1, 100))

    one.put(key_of(1), write)
    assert other.refresh() == ([key_of(1)], [])
    assert other.get(key_of(1)) == content_of(1, 100)
    assert len(all_files(tmp_path)) == 1


def test_file_stored_by_another_process_is_not_overwritten(
    one: DiskStore, other: DiskStore, tmp_path: Path
) -> None:
    put(other, 1)
    one.put(key_of(1), writes(7))  # it does not know yet
    assert one.get(key_of(1)) == content_of(1, 100)
    assert len(all_files(tmp_path)) == 1
    one.check_integrity()


def test_unfinished_file_of_live_writer_is_not_swept(one: DiskStore, tmp_path: Path) -> None:
    def write(path: Path) -> None:
        path.write_bytes(b"half")
        with open_store(tmp_path):
            assert path.read_bytes() == b"half"
        path.write_bytes(content_of(1, 100))

    put(one, 2)
    one.put(key_of(1), write)
    assert numbers_in(one) == {1, 2}
    one.check_integrity()


def test_writer_killed_before_rename_leaves_only_whole_files(
    one: DiskStore, tmp_path: Path
) -> None:
    """The writer is killed between write and rename."""
    put(one, 1)
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
    one.refresh()
    assert all(one.get(key) is not None for key in one.paths)
    assert one.stats().damaged == 0
    put(one, 2)
    one.check_integrity()
    key = key_of(3)
    (tmp_path / OWNER / temporary_name(key, process.pid)).write_bytes(b"half")
    put(one, 3)
    assert one.get(key) == content_of(3, 100)
    with open_store(tmp_path):
        assert not list(tmp_path.rglob("tmp-*"))


def test_changes_of_process_that_died_with_lock_are_found(
    one: DiskStore, other: DiskStore, tmp_path: Path
) -> None:
    """The process died between the rename and the new token."""
    put(one, 1)
    other.refresh()
    put(one, 2)
    (tmp_path / "lock").write_text("0" * 32)
    assert other.refresh() == ([key_of(2)], [])
    one.paths[key_of(1)].unlink()
    assert other.refresh() == ([], [key_of(1)])
    put(other, 3)
    assert one.refresh() == ([key_of(3)], [key_of(1)])
    assert FolderLock(tmp_path).token


def test_lock_held_forever_stops_writes_but_not_reads(
    one: DiskStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an older version did, which did not share its folder."""
    monkeypatch.setattr(shared_folder, "_TURN_WAIT_SECONDS", 0.05)
    put(one, 1)
    held = os.open(tmp_path / "lock", os.O_RDWR)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError):
            one.make_room(100)
        with pytest.raises(TimeoutError):
            DiskStore("disk", tmp_path, OWNER, LIMIT_BYTES)
        one.refresh()
        assert one.get(key_of(1)) == content_of(1, 100)
    finally:
        os.close(held)
    assert put(one, 2)
    one.check_integrity()


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
    store.check_integrity()
    for key in store.paths:
        number = int(key.partition("-")[2], 16)
        assert store.get(key) == content_of(number, 50 + 10 * number)
    assert store.stats().damaged == 0
    assert not list(tmp_path.rglob("tmp-*"))
