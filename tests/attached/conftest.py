"""Fixtures of the tests with engines that are not ours."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tiny import tiny_model
from upstreams import VllmServer

from aglite.engine.vllm import VllmEngine
from aglite.gateway.renderers import ChatRenderer, load_renderer


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    return load_renderer(tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
async def server(renderer: ChatRenderer) -> AsyncIterator[VllmServer]:
    made = VllmServer(renderer.tokenizer)
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def engine(server: VllmServer, renderer: ChatRenderer) -> AsyncIterator[VllmEngine]:
    made = VllmEngine(server.url, renderer.tokenizer)
    await made.start()
    server.requests.clear()
    server.headers.clear()
    yield made
    await made.stop()
