"""The parts of a run put together: store, model worker, gateway, launcher. `up`, `eval`, `serve` and `run` share it."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aglite.config import Recipe
from aglite.engine.base import EngineStats
from aglite.engine.worker_client import WorkerClient
from aglite.errors import AgliteError, EngineError
from aglite.gateway.app import create_model_app
from aglite.gateway.gateway import Gateway
from aglite.gateway.renderers import load_renderer
from aglite.net import Listener, bind
from aglite.paths import RunDir
from aglite.rollouts.launcher import Launcher, check_recipe
from aglite.rollouts.reaper import Reaper
from aglite.store import Store

CPU_CONTEXT = 4096
"""Longest context by default on the CPU, where a longer one would not be trained in any useful time."""


class Runtime:
    """Starts the parts in order and stops them in reverse; nothing is left running after `stop`."""

    def __init__(self, recipe: Recipe, run_dir: RunDir, store: Store, *, on_line: Callable[[str], None]) -> None:
        self.recipe = recipe
        self.run_dir = run_dir
        self.store = store
        self.on_line = on_line
        self.loading = ""
        """What the model worker is busy with while it starts."""
        self.progress: dict[str, Any] = {}
        """How far the model worker is with a training step: `{"done", "of"}` in micro-batches."""
        self._sock = bind(recipe.gateway.host, recipe.gateway.port, "the gateway", "gateway.port")
        self.reaper = Reaper(run_dir.path)
        self.worker: WorkerClient
        self.worker_started = asyncio.Event()
        self.gateway: Gateway
        self.launcher: Launcher | None = None
        """None when somebody else launches the rollouts."""
        self.ready = False
        """Whether agents are served."""
        self.stats = EngineStats()
        """The engine's counters, at most a second old while it samples."""
        self._listener: Listener | None = None
        self._poll: asyncio.Task[None] | None = None
        self._started: list[Any] = []

    async def start(self, model_dir: Path, *, trainer: bool, model_name: str = "") -> None:
        """Load the model and open the gateway. Raises AgliteError if a part cannot start; `stop` cleans up then too."""
        recipe = self.recipe
        await self.reaper.start()
        self._started.append(self.reaper)
        if recipe.agent.backend != "external":
            await check_recipe(recipe, self.run_dir, self.reaper)
        self.worker = WorkerClient(
            worker_command(),
            log_path=self.run_dir.logs / "worker.log",
            env={**os.environ, **self.reaper.environment},
            on_event=self._worker_event,
        )
        self._started.append(self.worker)
        await self.worker.start()
        self.worker_started.set()
        assert self.worker.pid is not None
        self.reaper.add(self.worker.pid)
        engine = recipe.engine.model_dump()
        engine["context_length"] = engine["context_length"] or min(CPU_CONTEXT, _positions(model_dir))
        settings = {**recipe.trainer.model_dump(), "kl": recipe.algorithm.kl} if trainer else None
        await self.worker.init(model=str(model_dir), engine=engine, trainer=settings, seed=recipe.seed)
        self.loading = ""
        renderer = await asyncio.to_thread(load_renderer, model_dir, recipe.gateway.continuation)
        self.gateway = Gateway(
            self.worker,
            self.store,
            renderer,
            model_name=model_name or recipe.model,
            settings=recipe.gateway,
            context_length=self.worker.info.context_length,
        )
        self._listener = Listener(create_model_app(self.gateway), self._sock)
        await self._listener.start()
        self._started.append(self._listener)
        self._started.append(self.gateway)
        if recipe.agent.backend != "external":
            self.launcher = Launcher(
                self.store, self.gateway, recipe, self.run_dir, base_url=lambda: self.url, reaper=self.reaper
            )
            self._started.append(self.launcher)
            await self.launcher.start()
        self.ready = True
        self._poll = asyncio.create_task(self._poll_stats())

    @property
    def url(self) -> str:
        """Where agents reach the gateway."""
        assert self._listener is not None
        return self._listener.url

    def own_launcher(self) -> Launcher:
        """The launcher. Raises AgliteError when the recipe leaves launching to others."""
        if self.launcher is None:
            raise AgliteError(
                f"{self.recipe.name} launches no agents itself (agent.backend: external)",
                "use a recipe with a command of its own",
            )
        return self.launcher

    def also_stop(self, part: Any) -> None:
        """Stop `part` too, before all that was started earlier."""
        self._started.append(part)

    async def stop(self) -> None:
        """End the rollouts, the gateway and the model worker, in that order."""
        if self._poll is not None:
            self._poll.cancel()
        failures = []
        for part in reversed(self._started):
            try:
                await part.stop()
            except Exception as error:  # every part gets its chance to stop; the first failure is raised at the end
                failures.append(error)
        self._started.clear()
        if self._listener is None:
            self._sock.close()
        if failures:
            raise failures[0]

    def _worker_event(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "loading":
            self.loading = f"loading: {data['stage']}"
            self.on_line(f"model worker: {self.loading}")
        elif kind == "train":
            self.progress = data

    async def _poll_stats(self) -> None:
        """Keep `stats` fresh. The worker answers between two engine steps, so during an update it takes as long."""
        while True:
            try:
                self.stats = await self.worker.stats()
            except EngineError:
                return  # the worker is gone; whoever watches it says so
            await asyncio.sleep(1.0)


def _positions(model_dir: Path) -> int:
    """How many tokens the model was made for."""
    config = json.loads((model_dir / "config.json").read_text())
    return config.get("max_position_embeddings") or CPU_CONTEXT


def worker_command() -> list[str]:
    """How the model worker is started; `AGLITE_WORKER` gives another module (and its arguments) that speaks the same
    protocol, such as the scripted engine of the tests."""
    return [sys.executable, "-m", *shlex.split(os.environ.get("AGLITE_WORKER", "aglite.worker"))]
