"""Reading a database whatever aglite wrote it, without changing it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from aglite.errors import OlderStoreError
from aglite.store import Store, db


@contextmanager
def readable(path: Path) -> Iterator[Store]:
    """The store at `path`; where an older aglite wrote it, a migrated copy of it in a temporary folder. Raises
    StoreError: not there, not aglite's, damaged, or from a newer aglite."""
    with ExitStack() as opened:
        try:
            store = Store.open(path, readonly=True)
        except OlderStoreError:
            copy = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="aglite-"))) / path.name
            db.copy(path, copy)
            Store.open(copy).close()  # migrates it
            store = Store.open(copy, readonly=True)
        opened.callback(store.close)
        yield store
