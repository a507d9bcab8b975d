"""What every part of the store stands on: the writer, and a read connection for each thread."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, TypeVar

from aglite.errors import StoreError
from aglite.redact import Redactor
from aglite.store import db
from aglite.store.records import pack_json
from aglite.store.writer import Operation, Writer
from aglite.units import encodable

Result = TypeVar("Result")


class StoreBase:
    """An open database: writes go through one thread, reads see every write whose `await` returned."""

    def __init__(self, path: Path, writer: Writer | None) -> None:
        self.path = path
        self.keep_messages = True
        """Whether what is said is stored, or tokens and numbers only."""
        self.redactor = Redactor(())
        """Masks what is stored."""
        self._writer = writer
        self._local = threading.local()
        self._readers: list[sqlite3.Connection] = []
        self._readers_lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Commit what was handed in and close the file. Closing twice is fine."""
        self._closed = True
        with self._readers_lock:
            for reader in self._readers:
                reader.close()
            self._readers.clear()
        if self._writer is not None:  # last, as only a connection that may write takes the write-ahead log away
            self._writer.close()

    def sync(self, write: Coroutine[Any, Any, Result]) -> Result:
        """Run one write where there is no event loop: `store.sync(store.set_meta("key", 1))`."""
        return asyncio.run(write)

    def wait_when_full(self, on_full: Callable[[bool], None]) -> None:
        """Let writes wait for room while the disk is full; see `Writer.wait_when_full`."""
        if self._writer is not None:
            self._writer.wait_when_full(on_full)

    def stop_waiting(self) -> None:
        """Let writes fail again while the disk is full."""
        if self._writer is not None:
            self._writer.stop_waiting()

    @property
    def commits(self) -> int:
        """Commits since opening: fewer than the writes when many came at once."""
        return self._writer.commits if self._writer else 0

    async def _write(self, operation: Operation[Result]) -> Result:
        if self._writer is None:
            raise StoreError(f"{self.path} is open for reading only", "open it without readonly")
        return await self._writer.write(operation)

    def _rows(self, sql: str, values: Iterable[Any] | dict[str, Any] = ()) -> list[sqlite3.Row]:
        return self._guard(lambda: self._reader().execute(sql, values).fetchall())

    def _row(self, sql: str, values: Iterable[Any] = ()) -> sqlite3.Row | None:
        return self._guard(lambda: self._reader().execute(sql, values).fetchone())

    def _guard(self, read: Any) -> Any:
        try:
            return read()
        except sqlite3.Error as error:
            raise db.explain(error, self.path) from error

    def _reader(self) -> sqlite3.Connection:
        if self._closed:
            raise StoreError(f"{self.path} is closed", "open the store again")
        reader = getattr(self._local, "reader", None)
        if reader is None:
            reader = self._local.reader = db.open_reader(self.path)
            with self._readers_lock:
                self._readers.append(reader)
        return reader


def _storable(value: Any) -> Any:
    """A value as SQLite takes it."""
    return encodable(value) if isinstance(value, str) else value


def insert(connection: sqlite3.Connection, table: str, row: dict[str, Any]) -> int:
    """Insert one row and return its rowid."""
    sql = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
    cursor = connection.execute(sql, tuple(map(_storable, row.values())))
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def update(connection: sqlite3.Connection, table: str, key: str, columns: dict[str, Any]) -> None:
    """Set columns of the row with `id` = key. Raises StoreError when there is none."""
    sets = ", ".join(f"{name} = ?" for name in columns)
    values = (*map(_storable, columns.values()), key)
    if not connection.execute(f"UPDATE {table} SET {sets} WHERE id = ?", values).rowcount:
        raise StoreError(f"there is no {table.rstrip('s')} {key} in the store")


def columns_of(given: dict[str, Any], allowed: frozenset[str], packed: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The given columns with the JSON ones packed. Raises StoreError for one that cannot be set."""
    unknown = given.keys() - allowed
    if unknown:
        raise StoreError(f"cannot set {', '.join(sorted(unknown))}", f"known columns: {', '.join(sorted(allowed))}")
    return {name: pack_json(value) if name in packed else value for name, value in given.items()}
