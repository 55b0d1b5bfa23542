"""What a process knows of the files in a folder, in the order of their last uses."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping

from vlm_server.cache.disk.files import StoredFile


class FileIndex:
    """Files by owner and name. Knows nothing of the disk. Not thread-safe."""

    def __init__(self) -> None:
        self._owners: dict[str, dict[str, StoredFile]] = {}
        self._names: dict[tuple[str, str], str] = {}
        """By owner and key."""
        self._order: list[StoredFile] = []
        """Least recently used first."""
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[StoredFile]:
        return iter(self._order)

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return self._size_bytes

    def of(self, owner: str) -> list[StoredFile]:
        """All files of an owner."""
        return list(self._owners.get(owner, {}).values())

    def find(self, owner: str, key: str) -> StoredFile | None:
        """The file of a key; of several, which none should have, the one that was added last."""
        name = self._names.get((owner, key))
        return None if name is None else self._owners[owner][name]

    def add(self, file: StoredFile) -> None:
        """In place of what was known by this name."""
        self.remove(file)
        self._owners.setdefault(file.owner, {})[file.name] = file
        self._names[file.owner, file.key] = file.name
        insort(self._order, file)
        self._size_bytes += file.size_bytes

    def remove(self, file: StoredFile) -> bool:
        """Forget what is known by this name; whether anything was."""
        known = self._owners.get(file.owner, {}).pop(file.name, None)
        if known is None:
            return False
        if self._names.get((file.owner, file.key)) == file.name:
            del self._names[file.owner, file.key]
        del self._order[bisect_left(self._order, known)]
        self._size_bytes -= known.size_bytes
        return True

    def oldest(self, keep: Collection[str]) -> StoredFile | None:
        """The least recently used file whose name is none of `keep`."""
        return next((file for file in self._order if file.name not in keep), None)

    def compare(
        self, there: Mapping[str, set[str]]
    ) -> tuple[list[tuple[str, str]], list[StoredFile]]:
        """Owner and name of what is there and not known, and what is known and not there."""
        new = [
            (owner, name)
            for owner, names in there.items()
            for name in names - self._owners.get(owner, {}).keys()
        ]
        gone = [
            files[name]
            for owner, files in self._owners.items()
            for name in files.keys() - there.get(owner, set())
        ]
        return new, gone
