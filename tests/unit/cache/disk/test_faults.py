"""Faults of the disk and of the process that uses it: valid files stay and are used again."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.integrity import check_integrity
from tests.unit.cache.disk_entries import content_of, key_of, numbers_in, open_store, put


class BrokenPath(type(Path())):  # type: ignore[misc]
    """A path that can't be read while there is an `error`."""

    error: Exception | None = None

    def read_bytes(self) -> bytes:
        if BrokenPath.error is not None:
            raise BrokenPath.error
        data: bytes = super().read_bytes()
        return data


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, "files"), OSError(errno.ENOMEM, "memory"), MemoryError()],
    ids=["EMFILE", "ENOMEM", "MemoryError"],
)
def test_lack_of_memory_or_descriptors_does_not_count_as_damage(
    tmp_path: Path, error: Exception
) -> None:
    with open_store(BrokenPath(tmp_path)) as store:
        put(store, 1)
        BrokenPath.error = error
        try:
            with pytest.raises(type(error)):
                store.get(key_of(1))
        finally:
            BrokenPath.error = None
        assert store.get(key_of(1)) == content_of(1, 100)
        assert (store.stats().damaged, store.stats().misses, store.stats().hits) == (0, 1, 1)
        check_integrity(store)


def test_files_can_be_evicted_below_limit(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for number in (1, 2, 3):
            put(store, number)
        assert store.evict(150, keep=[key_of(1)]) == [key_of(2), key_of(3)]
        assert numbers_in(store) == {1}
        assert store.evict(500) == [key_of(1)]
        check_integrity(store)


def test_removed_disk_cache_folder_is_created_again(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "cache"
    with open_store(folder) as store:
        put(store, 1)
        shutil.rmtree(tmp_path / "a")
        assert store.make_room(100) == [key_of(1)]
        put(store, 2)
        assert numbers_in(store) == {2}
        check_integrity(store)
    with open_store(folder) as store:
        assert store.get(key_of(2)) == content_of(2, 100)


def test_folder_recreated_by_another_process_is_shared(tmp_path: Path) -> None:
    with open_store(tmp_path / "cache") as store:
        put(store, 1)
        shutil.rmtree(tmp_path / "cache")
        with open_store(tmp_path / "cache") as other:
            put(other, 2)
            assert store.refresh() == ([key_of(2)], [key_of(1)])
            put(store, 3)
            assert other.refresh() == ([key_of(3)], [])
            check_integrity(other)
            check_integrity(store)


LIMITED = """
import resource, sys
from pathlib import Path
from tests.support.integrity import check_integrity
from tests.unit.cache.disk_entries import open_store, put, numbers_in
resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
with open_store(Path(sys.argv[1])) as store:
    try:
        put(store, 1, 100)
    except OSError as error:
        print(error.errno)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    put(store, 2, 100)
    check_integrity(store)
    print(*numbers_in(store), *(path.name[:4] for path in Path(sys.argv[1]).rglob("tmp-*")))
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit of file sizes")
def test_partly_written_file_is_removed(tmp_path: Path) -> None:
    """The system refuses in the middle of it, as a full disk does."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout.split() == [str(errno.EFBIG), "2"]
