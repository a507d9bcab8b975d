"""A gateway on a real socket, with the real store, a tiny tokenizer and a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import openai
import uvicorn

from aglite.config import GatewaySettings, Limits, TrainSampling
from aglite.engine.scripted import ScriptedEngine
from aglite.gateway.app import create_model_app
from aglite.gateway.gateway import Gateway
from aglite.gateway.renderers import ChatRenderer
from aglite.gateway.sessions import Session
from aglite.store import Store


@dataclass
class Stage:
    """Everything of a test's gateway."""

    gateway: Gateway
    engine: Any
    store: Store
    renderer: ChatRenderer
    url: str
    clients: list[Any] = field(default_factory=list)
    """Kept to the end, and closed then: one that is collected as garbage closes its sockets, and some time later what
    it takes for them, which may be somebody else's by then."""

    async def session(self, rollout_id: str = "r-1", **options: Any) -> Session:
        """Let in a rollout that the store knows."""
        if not self.store.rollouts() or all(row["id"] != rollout_id for row in self.store.rollouts()):
            await self.store.add_group(f"g-{rollout_id}", "t", "train", 1)
            await self.store.add_rollout(rollout_id, "t", f"g-{rollout_id}", "train", "local")
        options.setdefault("limits", Limits(calls=1000, sampled_tokens=100000))
        options.setdefault("sampling", TrainSampling(temperature=0.7))
        attempt = options.pop("attempt", 1)
        await self.store.set_rollout_state(rollout_id, "running", attempt=attempt)
        return self.gateway.open_session(rollout_id, attempt, **options)

    def client(self, session: Session, **options: Any) -> openai.AsyncOpenAI:
        options.setdefault("max_retries", 0)
        return self._kept(openai.AsyncOpenAI, base_url=f"{self.url}{session.path}/v1", api_key=session.token, **options)

    def anthropic(self, session: Session, **options: Any) -> anthropic.AsyncAnthropic:
        options.setdefault("max_retries", 0)
        return self._kept(
            anthropic.AsyncAnthropic, base_url=f"{self.url}{session.path}", api_key=session.token, **options
        )

    def _kept(self, kind: Any, **options: Any) -> Any:
        self.clients.append(kind(**options))
        return self.clients[-1]

    def calls(self, session: Session) -> list[Any]:
        return self.store.calls(session.rollout_id, session.attempt)


@contextlib.asynccontextmanager
async def running(
    folder: Path, renderer: Any, *, context_length: int = 4096, engine: Any = None, **settings: Any
) -> AsyncIterator[Stage]:
    """`engine`: another one than the scripted."""
    if engine is None:
        engine = ScriptedEngine(renderer.tokenizer, {}, context_length=context_length)
    store = Store.open(folder / "aglite.db")
    gateway = Gateway(
        engine,
        store,
        renderer,
        model_name="tiny",
        settings=GatewaySettings(**settings),
        context_length=context_length,
    )
    config = uvicorn.Config(create_model_app(gateway), port=0, log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    stage = Stage(gateway, engine, store, renderer, f"http://127.0.0.1:{port}")
    try:
        yield stage
    finally:
        for client in stage.clients:
            await client.close()
        gateway.gate.open()
        await gateway.stop()
        server.should_exit = True
        server.force_exit = True
        await serving
        store.close()
