"""Entries of a disk store, by number, and the stores that tests open in a folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlm_server.cache.disk.store import DiskStore

OWNER, OTHER = "a" * 64, "b" * 64


def key_of(number: int) -> str:
    return f"thing-{number:064x}"


def content_of(number: int, size_bytes: int = 100) -> bytes:
    return hashlib.shake_128(str(number).encode()).digest(size_bytes)


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


@contextmanager
def open_store(folder: Path, limit_bytes: int = 1000, owner: str = OWNER) -> Iterator[DiskStore]:
    """The store of a process that was just started and ends after the `with` block."""
    yield DiskStore("disk", folder, owner, limit_bytes)


def put(store: DiskStore, number: int, size_bytes: int = 100, keep: tuple[int, ...] = ()) -> bool:
    """Whether there was room."""
    if store.make_room(size_bytes, [key_of(each) for each in keep]) is None:
        return False
    store.put(key_of(number), lambda path: write(path, content_of(number, size_bytes)))
    return True


def numbers_in(store: DiskStore) -> set[int]:
    return {int(key.partition("-")[2], 16) for key in store.paths}


def all_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]


WRITER = """
import os, sys
from pathlib import Path
from tests.unit.cache.disk_entries import OWNER, content_of, key_of
from vlm_server.cache.disk.store import DiskStore

def slowly(number):
    def write(path):
        with path.open("wb") as file:
            for start in range(0, 200_000, 1000):
                file.write(content_of(number, 200_000)[start : start + 1000])
                file.flush()
    return write

store = DiskStore("disk", Path(sys.argv[1]), OWNER, 2_000_000)
for number in range(1_000_000):
    store.make_room(200_000)
    store.put(key_of(number), slowly(number))
    print(number, flush=True)
"""
"""A program that stores files slowly, and prints the number of each."""
