"""The store of uploaded files: names, owners, room, age, restarts, and disks that fail."""

from __future__ import annotations

import hashlib
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.clock import Clock
from vlm_server.api.files import folder as folder_module
from vlm_server.api.files.index import StoredFile
from vlm_server.api.files.store import OVERHEAD_BYTES, FileStore
from vlm_server.errors import ConfigError, NotSupported, PayloadTooLarge, StorageFull
from vlm_server.settings import FileSettings

KIB = 1024


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[FileStore]:
    opened = FileStore(FileSettings(), clock)
    yield opened
    opened.close()


def settings_with_room(num_files: int, **fields: Any) -> FileSettings:
    """Room for `num_files` files of 1 KiB."""
    return FileSettings(max_bytes=num_files * (KIB + OVERHEAD_BYTES), **fields)


def put(store: FileStore, owner: str, data: bytes) -> StoredFile:
    with store.upload() as upload:
        upload.write(data)
        return store.add_media(owner, upload)


def add(store: FileStore, owner: str, data: bytes, **fields: Any) -> StoredFile:
    with store.upload() as upload:
        upload.write(data)
        return store.add(owner, upload, "a.png", "vision", **fields)


def of(number: int) -> bytes:
    """A file of 1 KiB."""
    return number.to_bytes(4) * 256


def name_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def files_in(store: FileStore) -> set[str]:
    assert store._folder is not None
    return {path.name for path in store._folder.path.iterdir() if "index" not in path.name}


# ---- names and owners ------------------------------------------------------------------


def test_file_is_found_by_id_and_by_hash(store: FileStore) -> None:
    file = add(store, "me", b"bytes")
    for name in (file.id, name_of(b"bytes")):
        found = store.find("me", name)
        assert found is not None
        assert (found.id, store.read(found)) == (file.id, b"bytes")


def test_equal_bytes_are_stored_once_per_owner_and_hash(store: FileStore) -> None:
    for owner in ("me", "you"):
        assert put(store, owner, b"bytes").id == put(store, owner, b"bytes").id == name_of(b"bytes")
    assert len(store) == len(files_in(store)) == 2


def test_hash_outlives_file_with_same_bytes(store: FileStore) -> None:
    file = add(store, "me", b"bytes")
    put(store, "me", b"bytes")
    store.delete(file)
    assert store.find("me", name_of(b"bytes"))


def test_file_is_unknown_to_other_owners(store: FileStore) -> None:
    file = add(store, "me", b"bytes")
    assert store.find("you", file.id) is None
    assert store.find("you", name_of(b"bytes")) is None
    assert store.page("you", limit=10) == []


def test_equal_bytes_of_other_owner_are_written_again(store: FileStore) -> None:
    """Whether somebody else has the bytes makes no difference to what happens on disk."""
    before = put(store, "me", b"bytes")
    after = put(store, "you", b"bytes")
    assert before.path != after.path


def test_deleted_file_stays_readable_where_open(store: FileStore) -> None:
    file = add(store, "me", b"one\ntwo\n")
    reader = store.open(file)
    assert reader is not None
    store.delete(file)
    with reader:
        assert list(reader) == [b"one\n", b"two\n"]
    assert store.open(file) is None
    assert store.read(file) is None
    assert files_in(store) == set()


def test_damaged_file_is_dropped(store: FileStore) -> None:
    file = put(store, "me", b"bytes")
    assert store._folder is not None
    (store._folder.path / file.path).write_bytes(b"other")
    assert store.read(file) is None
    assert store.find("me", file.id) is None


def test_pages_follow_each_other_in_both_orders(store: FileStore) -> None:
    ids = [add(store, "me", of(i)).id for i in range(5)]
    put(store, "me", b"no id, not listed")
    for newest_first in (True, False):
        pages, after = [], None
        while page := store.page("me", after=after, limit=2, newest_first=newest_first):
            pages += [file.id for file in page]
            after = pages[-1]
        assert pages == (ids[::-1] if newest_first else ids)


# ---- room ------------------------------------------------------------------------------


def test_least_recently_used_file_is_evicted(clock: Clock) -> None:
    store = FileStore(settings_with_room(3), clock)
    first, second, third = (put(store, "me", of(i)) for i in range(3))
    clock.now += 1
    assert store.find("me", first.id)
    fourth = put(store, "me", of(3))
    kept = [store.find("me", each.id) is not None for each in (first, second, third, fourth)]
    assert kept == [True, False, True, True]
    assert (len(store), store.num_evicted) == (3, 1)
    assert store.size_bytes <= store.limit_bytes
    store.close()


def test_owner_with_most_bytes_loses_files(clock: Clock) -> None:
    store = FileStore(settings_with_room(4), clock)
    files = [put(store, "greedy", of(i)) for i in range(4)]
    modest = [put(store, "modest", of(i)) for i in range(2)]
    assert [store.find("greedy", each.id) is not None for each in files] == [False] * 2 + [True] * 2
    for i in range(4, 40):
        put(store, "greedy", of(i))
    assert all(store.find("modest", each.id) for each in modest)
    store.close()


def test_file_beyond_owners_share_is_refused(clock: Clock) -> None:
    store = FileStore(settings_with_room(4), clock)
    for owner in ("a", "b", "c"):
        put(store, owner, of(0))
    with pytest.raises(PayloadTooLarge):
        put(store, "d", b"x" * (2 * (KIB + OVERHEAD_BYTES)))
    assert len(store) == len(files_in(store)) == 3
    store.close()


def test_tiny_files_are_bounded_by_their_overhead(clock: Clock) -> None:
    store = FileStore(FileSettings(max_bytes=64 * OVERHEAD_BYTES), clock)
    for i in range(200):
        add(store, "me", b"%d" % i)
    assert len(store) == len(files_in(store)) == 63
    store.close()


def test_too_large_file_is_refused_while_it_arrives() -> None:
    small = FileStore(FileSettings(max_file_bytes=2048))
    with small.upload() as upload:
        upload.write(b"x" * 2048)
        with pytest.raises(PayloadTooLarge):
            upload.write(b"x")
    assert files_in(small) == set()
    small.close()


def test_store_without_room_takes_no_files() -> None:
    with pytest.raises(NotSupported), FileStore(FileSettings(max_bytes=0)).upload():
        pass


def test_concurrent_uploads_and_deletions_leave_files_of_index() -> None:
    store = FileStore(settings_with_room(20))
    go = threading.Barrier(4)

    def work(owner: str) -> None:
        go.wait()
        for i in range(60):
            file = put(store, owner, of(i % 7)) if i % 2 else add(store, owner, of(i))
            if i % 3 == 0:
                store.delete(file)
            found = store.find(owner, file.id)
            data = store.read(found) if found else None
            assert data is None or hashlib.sha256(data).hexdigest() == file.sha256

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(work, owner) for owner in ("a", "a", "b", "c")]:
            done.result()
    assert store._index is not None
    records = list(store._index)
    assert files_in(store) == {file.path for file in records}
    assert len(store) == len(records)
    assert store.size_bytes == sum(file.num_bytes + OVERHEAD_BYTES for file in records)
    assert store.size_bytes <= store.limit_bytes
    store.close()


# ---- age -------------------------------------------------------------------------------


def test_unused_file_expires_and_used_one_stays(clock: Clock) -> None:
    store = FileStore(FileSettings(keep_seconds=100), clock)
    used, unused = put(store, "me", of(1)), put(store, "me", of(2))
    clock.now += 60
    assert store.find("me", used.id)
    clock.now += 60
    assert store.find("me", unused.id) is None
    store.drop_expired()
    assert len(store) == len(files_in(store)) == 1
    assert store.find("me", used.id)
    store.close()


def test_file_expires_when_client_says(store: FileStore, clock: Clock) -> None:
    file = add(store, "me", b"bytes", expires_after_seconds=3600)
    assert file.expires_at == int(clock.now) + 3600
    clock.now += 3600
    assert store.find("me", file.id) is None
    assert store.page("me", limit=1) == []
    store.drop_expired()
    assert len(store) == 0


def test_expired_record_hides_no_live_one(store: FileStore, clock: Clock) -> None:
    add(store, "me", b"bytes", expires_after_seconds=3600)
    again = add(store, "me", b"bytes")
    clock.now += 3600
    found = store.find("me", name_of(b"bytes"))
    assert found is not None
    assert found.id == again.id


def test_expired_media_may_be_put_again(clock: Clock) -> None:
    store = FileStore(FileSettings(keep_seconds=100), clock)
    put(store, "me", b"bytes")
    clock.now += 101
    again = put(store, "me", b"bytes")
    assert store.find("me", again.id) == msgspec.structs.replace(again, used_at=clock.now)
    assert len(store) == len(files_in(store)) == 1
    store.close()


# ---- disks -----------------------------------------------------------------------------


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Files of this process can't have more, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_full_disk_is_reported_and_leaves_no_file(store: FileStore) -> None:
    kept = put(store, "me", b"bytes")
    with largest_file(1 << 20), pytest.raises(StorageFull):
        put(store, "me", b"x" * (2 << 20))
    assert files_in(store) == {kept.path}
    assert put(store, "me", b"after") != kept


def test_full_index_is_reported_and_leaves_no_file(store: FileStore) -> None:
    kept = put(store, "me", b"bytes")
    with largest_file(1), pytest.raises(StorageFull):
        put(store, "me", b"")
    assert files_in(store) == {kept.path}
    assert store.size_bytes == kept.num_bytes + OVERHEAD_BYTES
    assert store.find("me", kept.id)


@pytest.mark.parametrize("is_kept", [False, True])
def test_removed_folder_is_made_again(tmp_path: Path, is_kept: bool) -> None:
    store = FileStore(FileSettings(folder=str(tmp_path / "files") if is_kept else ""))
    lost = put(store, "me", b"bytes")
    assert store._folder is not None
    shutil.rmtree(store._folder.path)
    again = put(store, "me", b"other")
    found = store.find("me", again.id)
    assert found is not None
    assert store.read(found) == b"other"
    assert store.find("me", lost.id) is None
    assert len(store) == 1
    store.close()


# ---- folders ---------------------------------------------------------------------------


def test_kept_folder_survives_restart(tmp_path: Path) -> None:
    settings = FileSettings(folder=str(tmp_path / "files"))
    store = FileStore(settings)
    file = add(store, "me", b"bytes")
    size_bytes = store.size_bytes
    store.close()
    again = FileStore(settings)
    found = again.find("me", file.id)
    assert found is not None
    assert again.read(found) == b"bytes"
    assert (len(again), again.size_bytes) == (1, size_bytes)
    again.close()


def test_crash_leaves_neither_half_files_nor_lost_records(tmp_path: Path) -> None:
    settings = FileSettings(folder=str(tmp_path / "files"))
    store = FileStore(settings)
    whole, cut, lost = (add(store, "me", of(i)) for i in range(3))
    store.close()
    root = tmp_path / "files"
    (root / cut.path).write_bytes(b"half")
    (root / lost.path).unlink()
    (root / "0123456789abcdef").write_bytes(b"an upload that was arriving")
    again = FileStore(settings)
    assert [file.id for file in again.page("me", limit=9)] == [whole.id]
    assert files_in(again) == {whole.path}
    again.close()


def test_smaller_limit_evicts_at_start(tmp_path: Path) -> None:
    folder = str(tmp_path / "files")
    store = FileStore(settings_with_room(4, folder=folder))
    files = [add(store, "me", of(i)) for i in range(4)]
    store.close()
    again = FileStore(settings_with_room(2, folder=folder))
    assert [file.id for file in again.page("me", limit=9)] == [files[3].id, files[2].id]
    again.close()


def test_second_daemon_can_not_use_same_folder(tmp_path: Path) -> None:
    settings = FileSettings(folder=str(tmp_path / "files"))
    store = FileStore(settings)
    with pytest.raises(ConfigError, match="another daemon uses it"):
        FileStore(settings)
    store.close()
    FileStore(settings).close()


def test_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        FileStore(FileSettings(folder=str(tmp_path)))


def test_folder_that_is_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"files\.folder"):
        FileStore(FileSettings(folder=str(tmp_path / "file")))


def test_files_are_private_and_temporary_folder_is_removed(store: FileStore) -> None:
    put(store, "me", b"bytes")
    assert store._folder is not None
    path = store._folder.path
    assert path.stat().st_mode & 0o077 == 0
    store.close()
    assert not path.exists()
    assert (len(store), store.size_bytes) == (0, 0)


def test_temporary_folder_of_killed_daemon_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module.tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "vlm-server-files-left"
    left.mkdir(mode=0o700)
    (left / "file").touch()
    young = tmp_path / "vlm-server-files-young"
    young.mkdir(mode=0o700)
    os.utime(left, (0, 0))
    running = FileStore(FileSettings())
    put(running, "me", b"bytes")
    assert running._folder is not None
    os.utime(running._folder.path, (0, 0))
    other = FileStore(FileSettings())
    put(other, "me", b"bytes")
    assert (left.exists(), young.exists()) == (False, True)
    assert running.find("me", name_of(b"bytes"))
    running.close()
    other.close()
