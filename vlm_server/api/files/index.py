"""The index of stored files: one table in SQLite, next to the files. Not thread-safe."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct, structs

from vlm_server.api.parsing.media.external import HASH_PREFIX

MEDIA = "media"
"""The purpose of bytes that have no other name than their hash."""


class StoredFile(Struct, frozen=True):
    """A file of `owner`; times are in seconds since 1970."""

    id: str
    owner: str
    sha256: str
    num_bytes: int
    filename: str
    purpose: str
    created_at: int
    expires_at: int | None
    """When the client wants it dropped; None for no such time."""
    used_at: float
    path: str
    """The name of its file in the store's folder."""


def new_id() -> str:
    """An id that no other file has."""
    return f"file-{secrets.token_hex(12)}"


_FIELDS = structs.fields(StoredFile)
_COLUMNS = ", ".join(field.name for field in _FIELDS)
_MARKS = ", ".join("?" for _ in _FIELDS)
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS files ({_COLUMNS}, PRIMARY KEY (owner, id));
CREATE INDEX IF NOT EXISTS by_hash ON files (owner, sha256);
CREATE INDEX IF NOT EXISTS by_use ON files (owner, used_at);
"""


_IS_LIVE = "used_at >= ? AND coalesce(expires_at > ?, 1)"


class Live(NamedTuple):
    """The files that count: used since a time, and not expired at another, the current one."""

    used_since: float
    now: float


class FileIndex:
    """The records of all files, in the order of their uploads. Raises sqlite3.Error.

    A change survives the process when a call returns; if it `survives`, all but the last ones
    survive a power failure, too.
    """

    def __init__(self, path: Path, *, survives: bool) -> None:
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute(f"PRAGMA synchronous = {'NORMAL' if survives else 'OFF'}")
        self._database.executescript(_SCHEMA)

    def __iter__(self) -> Iterator[StoredFile]:
        return iter(self._select(""))

    def add(self, file: StoredFile) -> None:
        query = f"INSERT INTO files ({_COLUMNS}) VALUES ({_MARKS})"  # noqa: S608  our own names
        self._database.execute(query, structs.astuple(file))

    def find(self, owner: str, name: str, live: Live) -> StoredFile | None:
        """The live file of `owner` with that id, or one with that hash."""
        column, value = "id", name
        if name.startswith(HASH_PREFIX):
            column, value = "sha256", name.removeprefix(HASH_PREFIX)
        condition = f"WHERE owner = ? AND {column} = ? AND {_IS_LIVE} LIMIT 1"
        files = self._select(condition, owner, value, *live)
        return files[0] if files else None

    def named(self, owner: str, file_id: str) -> StoredFile | None:
        """The file of `owner` with that id, live or not."""
        files = self._select("WHERE owner = ? AND id = ?", owner, file_id)
        return files[0] if files else None

    def touch(self, file: StoredFile, used_at: float) -> None:
        """Record a use."""
        query = "UPDATE files SET used_at = ? WHERE owner = ? AND id = ?"
        self._database.execute(query, (used_at, file.owner, file.id))

    def remove(self, file: StoredFile) -> bool:
        """Remove a record; returns whether it was there, and not one of a later upload."""
        query = "DELETE FROM files WHERE owner = ? AND id = ? AND path = ?"
        return self._database.execute(query, (file.owner, file.id, file.path)).rowcount > 0

    def page(
        self,
        owner: str,
        live: Live,
        purpose: str | None,
        after: str | None,
        limit: int,
        *,
        newest_first: bool,
    ) -> list[StoredFile]:
        """At most `limit` live files with ids, those that follow `after` in this order."""
        conditions = ["owner = ?", "purpose != ?", _IS_LIVE]
        values: list[object] = [owner, MEDIA, *live]
        if purpose is not None:
            conditions.append("purpose = ?")
            values.append(purpose)
        if after is not None:
            place = "(SELECT rowid FROM files WHERE owner = ? AND id = ?)"
            conditions.append(f"rowid {'<' if newest_first else '>'} {place}")
            values += [owner, after]
        order = "DESC" if newest_first else "ASC"
        where = " AND ".join(conditions)
        return self._select(f"WHERE {where} ORDER BY rowid {order} LIMIT {limit:d}", *values)

    def oldest(self, owner: str) -> StoredFile:
        """The least recently used file of `owner`, who has some."""
        return self._select("WHERE owner = ? ORDER BY used_at LIMIT 1", owner)[0]

    def expired(self, live: Live) -> list[StoredFile]:
        """The files that are not live."""
        return self._select(f"WHERE NOT ({_IS_LIVE})", *live)

    def close(self) -> None:
        self._database.close()

    def _select(self, condition: str, *values: object) -> list[StoredFile]:
        rows = self._database.execute(f"SELECT {_COLUMNS} FROM files {condition}", values)  # noqa: S608
        return [StoredFile(*row) for row in rows]
