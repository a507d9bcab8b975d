"""The store: one SQLite file holds the whole run, and this class is the only thing that touches it."""

from __future__ import annotations

from pathlib import Path

from aglite.redact import Redactor
from aglite.store import db
from aglite.store.calls import CallStore
from aglite.store.judge import JudgeStore
from aglite.store.run import RunStore
from aglite.store.summary import SummaryStore
from aglite.store.upkeep import UpkeepStore
from aglite.store.writer import Writer


class Store(UpkeepStore, CallStore, JudgeStore, RunStore, SummaryStore):
    """A run's database.

    Writes are `async`, happen in the order they are asked for and return once committed; writes that come while a
    commit runs share the next one. A write that fails changes nothing and raises StoreError; when the disk is full,
    later writes succeed as soon as there is space. Reads are plain calls, quick, from any thread.
    """

    @classmethod
    def open(
        cls,
        path: str | Path,
        readonly: bool = False,
        keep_messages: bool = True,
        redactor: Redactor | None = None,
    ) -> Store:
        """Open a run's database; created, or migrated after a backup copy, unless `readonly`.

        `keep_messages` False stores tokens only (`retention.traffic: tokens`); `redactor` masks text before it is
        stored (`redact.stored`). Raises StoreError: not aglite's,
        damaged, from a newer aglite, or `readonly` and not there or older.
        """
        path = Path(path)
        if readonly:
            db.open_reader(path).close()
            return cls(path, None)
        store = cls(path, Writer(db.open_writer(path), path))
        store.keep_messages = keep_messages
        store.redactor = redactor or Redactor(())
        return store
