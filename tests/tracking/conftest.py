from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aglite.paths import RunDir
from aglite.store import Store


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


@pytest.fixture
def store(run_dir: RunDir) -> Iterator[Store]:
    store = Store.open(run_dir.db)
    recipe = {"name": "words", "trainer": {"lr": 0.5}, "agent": {"env": {"KEY": "very-secret"}}}
    store.sync(store.set_meta("manifest", {"recipe": recipe, "started_at": 1000.0}))
    yield store
    store.close()
