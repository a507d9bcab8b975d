"""The parts of a run put together: store, model worker, gateway, launcher. `up`, `eval`, `serve` and `run` share it."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aglite.blocking import abandonable
from aglite.config import Recipe
from aglite.engine.base import Engine, EngineStats
from aglite.engine.child import ChildExit
from aglite.engine.worker_client import WorkerClient
from aglite.errors import AgliteError, EngineError
from aglite.gateway.app import create_model_app
from aglite.gateway.doors import Doors
from aglite.gateway.gateway import Gateway
from aglite.gateway.renderers import ChatRenderer, load_renderer
from aglite.gateway.text import TextRenderer
from aglite.model_folder import cpu_context
from aglite.models import resolve_model
from aglite.net import allow_many_files, collect_rarely
from aglite.paths import RunDir
from aglite.rollouts.launcher import Launcher, check_recipe
from aglite.rollouts.reaper import Reaper
from aglite.store import Store

if TYPE_CHECKING:
    from aglite.engine.api import ApiEngine
    from aglite.engine.collocated import Collocated


class Runtime:
    """Starts the parts in order and stops them in reverse; nothing is left running after `stop`."""

    def __init__(
        self, recipe: Recipe, run_dir: RunDir, store: Store, *, on_line: Callable[[str], None], port: int | None = None
    ) -> None:
        """`port`: the gateway's, by default the recipe's."""
        self.recipe = recipe
        self.run_dir = run_dir
        self.store = store
        self.on_line = on_line
        self.loading = ""
        """What the model worker is busy with while it starts."""
        self.progress: dict[str, Any] = {}
        """How far the model worker is with a training step: `{"done", "of"}` in micro-batches."""
        self._doors = Doors(recipe.gateway, recipe.folder, own_agents=recipe.agent.backend != "external", port=port)
        self.port = self._doors.port
        self.reaper = Reaper(run_dir.path)
        self.worker: WorkerClient | Collocated
        """What samples and trains; there is none when the engine is somebody else's."""
        self.worker_started = asyncio.Event()
        self.engine: Engine | ApiEngine
        self.gateway: Gateway
        self.launcher: Launcher | None = None
        """None when somebody else launches the rollouts."""
        self.ready = False
        """Whether agents are served."""
        self.stats = EngineStats()
        """The engine's counters, at most a second old while it samples."""
        self._poll: asyncio.Task[None] | None = None
        self._started: list[Any] = []

    async def start(self, model: str, *, trainer: bool, model_name: str = "") -> None:
        """Load the model, or attach to the engine that has it, and open the gateway. `model_name` is what agents see.
        Raises AgliteError if a part cannot start; `stop` cleans up then too."""
        recipe = self.recipe
        model_dir = await self._find(model)
        if trainer and model_dir is not None and recipe.engine.own_vllm:
            from aglite.memory_plan.card import refuse_what_does_not_fit

            await abandonable(refuse_what_does_not_fit, recipe, model_dir, self.on_line)
        allow_many_files()
        collect_rarely()
        await self.reaper.start()
        self._started.append(self.reaper)
        if recipe.agent.backend != "external":
            await check_recipe(recipe, self.run_dir, self.reaper)
        renderer: ChatRenderer | TextRenderer
        if model_dir is not None and recipe.engine.kind == "embedded":
            renderer = await self._start_worker(model_dir, trainer)
        elif model_dir is not None and recipe.engine.own_vllm:
            renderer = await self._start_vllm(model_dir, trainer)
        else:
            renderer = await self._attach(model_dir)
        context_length = self.engine.info.context_length
        if recipe.engine.context_length:
            context_length = min(context_length or recipe.engine.context_length, recipe.engine.context_length)
        self.gateway = Gateway(
            self.engine,
            self.store,
            renderer,
            model_name=model_name or recipe.model,
            settings=recipe.gateway,
            context_length=context_length,
        )
        self._started.append(self._doors)
        await self._doors.open(create_model_app(self.gateway))
        self._started.append(self.gateway)
        if recipe.agent.backend != "external":
            self.launcher = Launcher(
                self.store,
                self.gateway,
                recipe,
                self.run_dir,
                base_url=lambda: self.url,
                serve=self._doors.serve,
                reaper=self.reaper,
            )
            self._started.append(self.launcher)
            await self.launcher.start()
            if exposed := self.launcher.sandbox.get("exposed"):
                self.on_line(exposed)
        self.ready = True
        self._poll = asyncio.create_task(self._poll_stats())

    async def _find(self, model: str) -> Path | None:
        """The model's folder; of a model that somebody else serves without its weights, or none for one that is only
        known by its text."""
        engine = self.recipe.engine
        if engine.kind == "api":
            return None
        folder = await abandonable(resolve_model, model, self.on_line, weights=not engine.url)
        await self.store.set_meta("model_dir", str(folder.resolve()))
        return folder

    async def _start_worker(self, model_dir: Path, trainer: bool) -> ChatRenderer:
        recipe = self.recipe
        self.worker = self.engine = worker = await self._start_process()
        self.worker_started.set()
        engine = recipe.engine.model_dump()
        engine["context_length"] = engine["context_length"] or cpu_context(model_dir)
        engine["device"] = recipe.trainer.device
        settings = self._trainer_settings() if trainer else None
        await worker.init(model=str(model_dir), engine=engine, trainer=settings, seed=recipe.seed)
        self.loading = ""
        return await asyncio.to_thread(load_renderer, model_dir, recipe.gateway.continuation)

    async def _start_process(self) -> WorkerClient:
        """A model worker that has loaded nothing yet."""
        worker = WorkerClient(
            worker_command(),
            log_path=self.run_dir.logs / "worker.log",
            env=self._environment(),
            on_event=self._worker_event,
        )
        self._started.append(worker)
        await worker.start()
        assert worker.pid is not None
        self.reaper.add(worker.pid)
        return worker

    def _environment(self) -> dict[str, str]:
        return {**without_keys(self.recipe), **self.reaper.environment}

    def _trainer_settings(self) -> dict[str, Any]:
        return {**self.recipe.trainer.model_dump(), "kl": self.recipe.algorithm.kl}

    async def _start_vllm(self, model_dir: Path, trainer: bool) -> ChatRenderer:
        """vLLM to sample, and a worker of its own to train if that is wanted."""
        from aglite.engine.collocated import build

        recipe = self.recipe
        renderer = await asyncio.to_thread(load_renderer, model_dir, recipe.gateway.continuation)
        collocated = build(
            recipe,
            self.run_dir,
            model_dir,
            renderer.tokenizer,
            trainer=await self._start_process() if trainer else None,
            reaper=self.reaper,
            env=self._environment(),
            on_stage=lambda stage: self._worker_event("loading", {"stage": stage}, "vLLM"),
        )
        self.worker = self.engine = collocated
        self._started.append(collocated)
        self.worker_started.set()
        await collocated.start(model_dir, self._trainer_settings(), recipe.seed, recipe.engine.threads)
        self.loading = ""
        return renderer

    async def _attach(self, model_dir: Path | None) -> ChatRenderer | TextRenderer:
        """Use an engine that somebody else runs."""
        from aglite.engine.api import ApiEngine
        from aglite.engine.vllm import VllmEngine

        recipe, settings = self.recipe, self.recipe.engine
        renderer: ChatRenderer | TextRenderer = TextRenderer()
        if model_dir is None:
            self.engine = ApiEngine(settings.url, settings.model, key_env=settings.key_env)
        else:
            renderer = await asyncio.to_thread(load_renderer, model_dir, recipe.gateway.continuation)
            self.engine = VllmEngine(settings.url, renderer.tokenizer, model=settings.model, key_env=settings.key_env)
        self._started.append(self.engine)
        await self.engine.start()
        self.on_line(f"attached to {settings.kind} {self.engine.info.model} at {settings.url}")
        return renderer

    @property
    def crash(self) -> ChildExit | None:
        """How the model worker ended if nobody had asked it to."""
        if not self.worker_started.is_set() or not self.worker.exited.done():
            return None
        exit = self.worker.exited.result()
        return None if exit.stopped else exit

    @property
    def silent_s(self) -> int:
        """How long the model worker has given no sign of life."""
        return self.worker.silent_s if self.worker_started.is_set() else 0

    @property
    def stalled(self) -> str:
        """That the engine answers, but samples nothing though it was asked; '' if it does."""
        return self.worker.stalled if self.worker_started.is_set() else ""

    @property
    def url(self) -> str:
        """Where agents on this machine reach the gateway."""
        return self._doors.url

    @property
    def public_url(self) -> str:
        """Where agents that somebody else launches reach the gateway."""
        return self._doors.public_url

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
        self._doors.close()
        if failures:
            raise failures[0]

    def _worker_event(self, kind: str, data: dict[str, Any], who: str = "model worker") -> None:
        if kind == "loading":
            self.loading = f"loading: {data['stage']}"
            self.on_line(f"{who}: {self.loading}")
        elif kind == "train":
            self.progress = data

    async def _poll_stats(self) -> None:
        """Keep `stats` fresh. The worker answers between two engine steps, so during an update it takes as long."""
        while True:
            try:
                self.stats = await self.engine.stats()
            except EngineError:
                return  # the worker is gone; whoever watches it says so
            await asyncio.sleep(1.0)


def without_keys(recipe: Recipe) -> dict[str, str]:
    """The environment without the key of the judge, which no child of ours has a use for."""
    key = recipe.reward.judge.key_env if recipe.reward and recipe.reward.judge else ""
    return {name: value for name, value in os.environ.items() if name != key}


def worker_command() -> list[str]:
    """How the model worker is started; `AGLITE_WORKER` gives another module (and its arguments) that speaks the same
    protocol, such as the scripted engine of the tests."""
    return [sys.executable, "-m", *shlex.split(os.environ.get("AGLITE_WORKER", "aglite.worker"))]
