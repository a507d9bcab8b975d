from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aglite.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "aglite.db")
    yield store
    store.close()
