"""Batches and the results of their lines, in SQLite, next to the stored files."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import structs

from vlm_server.api.batches.batch import ACTIVE, Batch, Counted
from vlm_server.errors import StorageFull

_FIELDS = tuple(field.name for field in structs.fields(Batch))
_COLUMNS = ", ".join(_FIELDS)
_MARKS = ", ".join("?" for _ in _FIELDS)
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS batches ({_COLUMNS}, PRIMARY KEY (id));
CREATE TABLE IF NOT EXISTS results (batch, line, kind, data, PRIMARY KEY (batch, line));
"""
_IS_ACTIVE = f"status IN ({', '.join(repr(status) for status in ACTIVE)})"


class BatchStore:
    """All batches, in the order of their creation. Thread-safe; raises StorageFull.

    What a call has recorded survives the death of the process once the call returns.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        with _failures():
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.executescript(_SCHEMA)

    # ---- batches -------------------------------------------------------------------------

    def add(self, batch: Batch, max_batches: int) -> bool:
        """Record a new batch, and drop its owner's oldest ended ones beyond `max_batches` in all.

        Returns False if as many are active already.
        """
        with self._changing():
            own = self._select("WHERE owner = ? ORDER BY rowid", batch.owner)
            ended = [other for other in own if not other.is_active]
            num_excess = len(own) + 1 - max_batches
            if num_excess > len(ended):
                return False
            for other in ended[: max(0, num_excess)]:
                self._database.execute("DELETE FROM batches WHERE id = ?", (other.id,))
            query = f"INSERT INTO batches ({_COLUMNS}) VALUES ({_MARKS})"  # noqa: S608  our own names
            self._database.execute(query, structs.astuple(batch))
            return True

    def active(self) -> list[Batch]:
        """The batches that have not ended, the oldest first."""
        with self._lock, _failures():
            return self._select(f"WHERE {_IS_ACTIVE} ORDER BY rowid")

    def find(self, owner: str, batch_id: str) -> Batch | None:
        with self._lock, _failures():
            batches = self._select("WHERE owner = ? AND id = ?", owner, batch_id)
            return batches[0] if batches else None

    def page(
        self, owner: str, kind: str, after: str | None, limit: int, *, newest_first: bool = True
    ) -> list[Batch]:
        """At most `limit` batches of `owner` whose ids begin with `kind`, those after `after`."""
        where, values = "WHERE owner = ? AND id GLOB ?", [owner, f"{kind}*"]
        if after is not None:
            sign = "<" if newest_first else ">"
            where += f" AND rowid {sign} (SELECT rowid FROM batches WHERE id = ?)"  # noqa: S608
            values.append(after)
        order = "DESC" if newest_first else "ASC"
        with self._lock, _failures():
            return self._select(f"{where} ORDER BY rowid {order} LIMIT {limit:d}", *values)

    def change(self, batch: Batch, **values: object) -> bool:
        """Set fields, if `batch` is still in its state; returns whether it was."""
        assert values.keys() <= set(_FIELDS)
        changes = ", ".join(f"{name} = ?" for name in values)
        query = f"UPDATE batches SET {changes} WHERE id = ? AND status = ?"  # noqa: S608
        with self._changing():
            cursor = self._database.execute(query, (*values.values(), batch.id, batch.status))
            return cursor.rowcount > 0

    # ---- results -------------------------------------------------------------------------

    def add_results(self, batch: Batch, lines: list[tuple[int, Counted, bytes]]) -> None:
        """Record and count results by line; a line that has one keeps it."""
        query = "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)"
        with self._changing():
            for line, kind, data in lines:
                if self._database.execute(query, (batch.id, line, kind, data)).rowcount > 0:
                    self._database.execute(
                        f"UPDATE batches SET {kind} = {kind} + 1, num_bytes = num_bytes + ? "  # noqa: S608
                        "WHERE id = ?",
                        (len(data), batch.id),
                    )

    def done_lines(self, batch: Batch) -> set[int]:
        """The lines that have results."""
        query = "SELECT line FROM results WHERE batch = ?"
        with self._lock, _failures():
            return {row[0] for row in self._database.execute(query, (batch.id,))}

    def results(self, batch: Batch, *, completed: bool) -> Iterator[bytes]:
        """The results of completed lines, or those of all others, by line."""
        query = (
            "SELECT line, data FROM results WHERE batch = ? AND (kind = 'completed') = ? "
            "AND line > ? ORDER BY line LIMIT 1"
        )
        line = -1
        while True:
            with self._lock, _failures():
                row = self._database.execute(query, (batch.id, completed, line)).fetchone()
            if row is None:
                return
            line, data = row
            yield data

    def end(self, batch: Batch, **values: object) -> None:
        """Set the fields of a batch that ends, and drop its results, which are in files."""
        if self.change(batch, **values):
            with self._changing():
                self._database.execute("DELETE FROM results WHERE batch = ?", (batch.id,))

    def delete(self, batch: Batch) -> None:
        """Forget a batch that has ended."""
        with self._changing():
            self._database.execute("DELETE FROM batches WHERE id = ?", (batch.id,))

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _select(self, condition: str, *values: object) -> list[Batch]:
        rows = self._database.execute(f"SELECT {_COLUMNS} FROM batches {condition}", values)  # noqa: S608
        return [Batch(*row) for row in rows]

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """One transaction."""
        with self._lock, _failures():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error:
        text = "The server can't record batches: its disk is full or fails."
        raise StorageFull(text) from None
