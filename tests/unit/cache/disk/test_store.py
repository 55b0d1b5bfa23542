"""Files that outlive the process: whole, unchanged and within their bytes, or not at all."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
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
    write,
)
from vlm_server.cache.disk.files import default_folder


def test_stored_entry_is_found_after_restart(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert put(store, 1)
        assert store.get(key_of(1)) == content_of(1, 100)
    with open_store(tmp_path) as store:
        assert key_of(1) in store
        assert store.get(key_of(1)) == content_of(1, 100)
        assert store.get(key_of(2)) is None
        check_integrity(store)
        reading = store.stats()
        assert (reading.entries, reading.size_bytes, reading.limit_bytes) == (1, 100, 1000)
        assert (reading.hits, reading.misses, reading.damaged) == (1, 1, 0)


def test_cache_files_are_private_to_their_user(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with open_store(tmp_path / "cache") as store:
            put(store, 1)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert {modes[path] for path in modes if path.is_file()} == {0o600}
    assert {modes[path] for path in modes if path.is_dir()} == {0o700}


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:50],
        lambda data: b"",
        lambda data: data + b"\0",
        lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:],
    ],
    ids=["truncated", "emptied", "extended", "one bit flipped"],
)
def test_damaged_disk_cache_file_is_deleted_and_counted(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    with open_store(tmp_path) as store:
        put(store, 1)
        put(store, 2)
        path = store.paths[key_of(1)]
        path.write_bytes(damage(path.read_bytes()))
        assert store.get(key_of(1)) is None
        assert not path.exists()
        reading = store.stats()
        assert (reading.damaged, reading.hits, reading.misses, reading.entries) == (1, 0, 1, 1)
        check_integrity(store)
        put(store, 1)
        assert store.get(key_of(1)) == content_of(1, 100)


def test_eviction_order_by_last_use_survives_restart(tmp_path: Path) -> None:
    with open_store(tmp_path, 300) as store:
        for number in (1, 2, 3):
            put(store, number)
        store.touch([key_of(2), key_of(1)])
    with open_store(tmp_path, 300) as store:
        assert store.make_room(100) == [key_of(3)]
        put(store, 4)
        assert numbers_in(store) == {1, 2, 4}
        assert store.make_room(200) == [key_of(2), key_of(1)]
        assert store.stats().evictions == 3
        check_integrity(store)


def test_files_dated_in_future_are_evicted_in_order(tmp_path: Path) -> None:
    with open_store(tmp_path, 300) as store:
        for number in (1, 2, 3):
            put(store, number)
        for path in store.paths.values():
            ahead = path.stat().st_mtime_ns + 365 * 24 * 3600 * 10**9
            os.utime(path, ns=(ahead, ahead))
    for number in (4, 5):
        with open_store(tmp_path, 300) as store:
            put(store, number)
    assert numbers_in(store) == {3, 4, 5}


def test_entries_to_keep_are_not_evicted_for_put(tmp_path: Path) -> None:
    with open_store(tmp_path, 300) as store:
        for number in (1, 2, 3):
            put(store, number)
        assert put(store, 4, 100, keep=(1,))
        assert numbers_in(store) == {1, 3, 4}
        assert not put(store, 5, 250, keep=(1,))
        assert numbers_in(store) == {1, 3, 4}


def test_smaller_limit_evicts_when_store_opens(tmp_path: Path) -> None:
    with open_store(tmp_path, 300) as store:
        for number in (1, 2, 3):
            put(store, number)
    with open_store(tmp_path, 150):
        assert sum(path.stat().st_size for path in all_files(tmp_path)) == 100


def test_file_larger_than_announced_stays_within_limit(tmp_path: Path) -> None:
    with open_store(tmp_path, 300) as store:
        put(store, 1)
        store.make_room(100)
        with pytest.raises(OSError, match="no room"):
            store.put(key_of(2), lambda path: write(path, bytes(350)))
        with pytest.raises(OSError, match="no room"):
            store.put(key_of(2), lambda path: write(path, bytes(250)), keep=[key_of(1)])
        assert numbers_in(store) == {1}
        assert len(all_files(tmp_path)) == 1
        assert store.put(key_of(2), lambda path: write(path, bytes(250))) == [key_of(1)]
        check_integrity(store)


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError

    with open_store(tmp_path) as store:
        with pytest.raises(RuntimeError):
            store.put(key_of(1), fail)
        assert all_files(tmp_path) == []
        check_integrity(store)


def test_owners_share_limit_but_no_entries(tmp_path: Path) -> None:
    with open_store(tmp_path, 300) as store:
        put(store, 1)
        put(store, 2)
    with open_store(tmp_path, 300, OTHER) as store:
        assert store.get(key_of(1)) is None
        assert store.stats().size_bytes == 200
        put(store, 3)
        put(store, 4)
        check_integrity(store)
    with open_store(tmp_path, 300) as store:
        assert numbers_in(store) == {2}
        store.make_room(300)
    with open_store(tmp_path, 300):
        assert not (tmp_path / OTHER).exists()


def test_unfinished_files_are_swept_and_foreign_files_kept(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, 1)
    mine = [tmp_path / "letter.txt", tmp_path / "photos" / "tmp-1.safetensors"]
    mine += [tmp_path / OWNER / "letter.txt", tmp_path / "weights.safetensors"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    (tmp_path / OTHER).symlink_to(tmp_path / "photos")
    orphan = tmp_path / OWNER / f"tmp-{key_of(2)}.safetensors"
    orphan.write_bytes(b"half")
    with open_store(tmp_path, 100) as store:
        assert not orphan.exists()
        assert all(path.read_text() == "mine" for path in mine)
        assert store.make_room(100) == [key_of(1)]
        assert all(path.exists() for path in mine)


def test_killed_process_leaves_only_whole_files_on_disk(tmp_path: Path) -> None:
    for after in (1, 3, 12):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        for _ in range(after):
            process.stdout.readline()
        while not list(tmp_path.rglob("tmp-*")):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with open_store(tmp_path, 2_000_000) as store:
            assert not list(tmp_path.rglob("tmp-*"))
            numbers = numbers_in(store)
            assert len(numbers) >= min(after, 8)
            for number in numbers:
                assert store.get(key_of(number)) == content_of(number, 200_000)
            assert store.stats().damaged == 0
            check_integrity(store)


def test_default_folder_is_cache_folder_of_system(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_folder() == tmp_path / "Library/Caches/vlm-server"
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_folder() == tmp_path / ".cache/vlm-server"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_folder() == tmp_path / ".cache/vlm-server"
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert default_folder() == Path("/elsewhere/vlm-server")
