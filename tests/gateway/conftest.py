"""Fixtures of the gateway's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from staging import Stage, running
from tiny import tiny_model

from aglite.gateway.renderers import ChatRenderer, load_renderer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def renderer(model_dir: Path) -> ChatRenderer:
    return load_renderer(model_dir)


@pytest.fixture
async def stage(tmp_path: Path, renderer: ChatRenderer) -> AsyncIterator[Stage]:
    async with running(tmp_path, renderer) as made:
        yield made
