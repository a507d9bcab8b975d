"""vLLM and a trainer that take turns on one accelerator; to the rest of aglite they are one model worker."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aglite.config import Recipe
from aglite.engine import arrival, vllm_own
from aglite.engine.arrival import Answers
from aglite.engine.base import EngineInfo, EngineStats
from aglite.engine.child import ChildExit
from aglite.engine.vllm_own import OwnVllm
from aglite.engine.vllm_server import NAME, VllmServer, dtype, environment, flags, private_folder
from aglite.engine.worker_client import WorkerClient
from aglite.errors import AgliteError, DiskFullError, EngineError
from aglite.gateway.tokenizer import TextTokenizer
from aglite.memory_plan.card import present_card
from aglite.model_folder import cpu_context
from aglite.paths import RunDir

if TYPE_CHECKING:
    from aglite.rollouts.reaper import Reaper


class Collocated:
    """One update: `preempt`, `sleep`, any number of `train`, `resume`. Without a trainer it only serves.

    `level` is that of vLLM's sleep, `must_sleep` whether that frees what the trainer needs, `ipc` whether weights go
    from GPU memory to GPU memory, `dtype` their type in vLLM. `memory` is a private folder in memory, `disk` one on the
    disk, for weights that go by files; both are deleted.
    """

    def __init__(
        self,
        engine: OwnVllm,
        trainer: WorkerClient | None,
        tokenizer: TextTokenizer,
        *,
        level: int,
        must_sleep: bool,
        ipc: bool,
        dtype: str,
        memory: Path,
        disk: Path,
    ) -> None:
        self.engine = engine
        self.trainer = trainer
        self.generate = engine.generate
        self.sleeps = trainer is not None
        self.tolerance = arrival.TOLERANCE.get(dtype, arrival.ROUNDED)
        self.exited: asyncio.Future[ChildExit] = asyncio.get_running_loop().create_future()
        """How the first of the two ended."""
        self._probe = tokenizer.encode(arrival.TEXT)
        self._level = level
        self._must_sleep = must_sleep
        self._ipc = ipc
        self._dtype = dtype
        self._memory = memory
        self._disk = disk
        self._answers: Answers | None = None
        self._onloaded = False
        self._changed = False
        """Whether the trainer's weights are newer than the engine's."""

    # processes

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    @property
    def holders(self) -> dict[int, str]:
        """Which processes may hold memory of a GPU, by id."""
        found = {self.engine.server.child.pid: "vLLM"}
        if self.trainer is not None:
            found[self.trainer.pid] = "trainer"
        return {pid: name for pid, name in found.items() if pid}

    @property
    def silent_s(self) -> int:
        """How long one of them, `name`, has given no sign of life."""
        return max(self.engine.server.silent_s, self.trainer.silent_s if self.trainer is not None else 0)

    @property
    def name(self) -> str:
        silent = self.trainer is not None and self.trainer.silent_s > self.engine.server.silent_s
        return "trainer" if silent else self.engine.server.child.name

    @property
    def stalled(self) -> str:
        """That vLLM answers, but has given no token for long; '' if it has."""
        waited = self.engine.waited_s
        if waited < vllm_own.QUIET_S:
            return ""
        return f"the {NAME} has given no token for {waited} s (it is ended after {vllm_own.STALL_S:g})"

    def watch(self, exited: asyncio.Future[ChildExit]) -> None:
        """Take the end of this process for the end of both."""
        exited.add_done_callback(lambda done: self.exited.done() or self.exited.set_result(done.result()))

    async def start(self, model: Path, settings: dict[str, Any], seed: int, threads: int | None) -> None:
        """Load the trainer, then vLLM, which wants to find the accelerator as the trainer leaves it, and compare what
        both make of a text. Raises AgliteError."""
        expected = None
        if self.trainer is not None:
            await self.trainer.init(model, engine=None, trainer=settings, seed=seed, threads=threads)
            expected = await self._expected()
            await self.trainer.offload()
        await self.engine.server.start()
        self.watch(self.engine.server.exited)
        self.engine.owners = self.holders
        await self.engine.start()
        if expected is not None:
            self._check(await self._ask(expected))

    async def stop(self) -> None:
        """End vLLM and clear away what lies in memory; the trainer is stopped by whoever started it."""
        try:
            await self.engine.stop()
        finally:
            for folder in (self._memory, self._disk):
                shutil.rmtree(folder, ignore_errors=True)

    # engine

    async def stats(self) -> EngineStats:
        return await self.engine.stats()

    async def preempt(self) -> None:
        await self.engine.preempt()

    async def sleep(self) -> None:
        """Let vLLM leave the accelerator to the trainer. Raises EngineError; on the CPU, where its sleep frees nothing,
        it may refuse."""
        try:
            await self.engine.sleep(self._level)
        except EngineError:
            if self._must_sleep or self.engine.server.child.ended:
                raise
        await self._trainer().onload()
        self._onloaded = True

    async def resume(self, version: int) -> None:
        """Let the trainer leave the accelerator to vLLM, bring it the new weights if there are any, see that it
        computes with them, and go on as policy `version`. Raises EngineError; vLLM is of no use then and is ended."""
        expected = await self._expected() if self._changed else None
        if self._onloaded:
            await self._trainer().offload()
            self._onloaded = False
        try:
            await self.engine.wake_weights()
            if self._changed or not self.engine.has_weights:
                await self._transfer()
            await self.engine.resume(version)
        except AgliteError as error:
            await self.engine.server.child.kill(f"new weights could not be brought to vLLM: {error}")
            raise
        if expected is not None:
            self._check(await self._ask(expected))
        self._changed = False

    async def _transfer(self) -> None:
        trainer = self._trainer()
        if self._ipc:
            async with contextlib.aclosing(trainer.parcels(self._dtype)) as parcels:  # type: ignore[type-var]
                await self.engine.load_parcels(parcels)
            return
        folder = self._memory / "weights"
        try:
            await trainer.export(folder, self._dtype)
        except DiskFullError:
            folder = self._disk
            await trainer.export(folder, self._dtype)
        try:
            await self.engine.load_folder(folder)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    # whether the engine has the trainer's weights

    async def _expected(self) -> list[float]:
        (found,) = await self._trainer().logprobs([self._probe], 1.0, "trainer")
        return found

    async def _ask(self, expected: list[float]) -> Answers:
        return Answers(await self.engine.logprobs(self._probe), expected)

    def _check(self, now: Answers) -> None:
        if problem := arrival.problem(now, self._answers, self.tolerance):
            raise EngineError(
                f"vLLM does not have the trainer's weights: {problem}",
                "set `engine.transfer: folder`, and see that engine.args and the version of vLLM are those of the docs",
            )
        self._answers = now

    # training

    def _trainer(self) -> WorkerClient:
        if self.trainer is None:
            raise EngineError("this engine only samples", "start it with a trainer")
        return self.trainer

    async def train(self, batch: dict[str, Any]) -> dict[str, Any]:
        """One training step; vLLM gets the weights in `resume`."""
        result = await self._trainer().train(batch)
        self._changed = self._changed or bool(result["applied"])
        return result

    async def logprobs(
        self, rows: Sequence[Sequence[int]], temperature: float, source: str = "engine"
    ) -> list[list[float]]:
        """Log-probability of every token but the first of each row; the engine knows temperature 1 only."""
        if source == "trainer":
            return await self._trainer().logprobs(rows, temperature, source)
        if temperature != 1.0:
            raise EngineError("vLLM computes log-probabilities of given tokens at temperature 1 only")
        return [await self.engine.logprobs(row) for row in rows]

    async def save(self, path: Path | str, meta: dict[str, Any]) -> None:
        await self._trainer().save(path, meta)

    async def load(self, path: Path | str) -> dict[str, Any]:
        """Go back to a checkpoint; vLLM gets its weights in `resume`."""
        await self.preempt()
        await self.sleep()
        meta = await self._trainer().load(path)
        self._changed = True
        return meta

    async def export(self, path: Path | str) -> None:
        await self._trainer().export(path)


def build(
    recipe: Recipe,
    run_dir: RunDir,
    model_dir: Path,
    tokenizer: TextTokenizer,
    *,
    trainer: WorkerClient | None,
    reaper: Reaper,
    env: dict[str, str],
    on_stage: Callable[[str], None],
) -> Collocated:
    """The two for a recipe; vLLM has not been started yet."""
    settings = recipe.engine
    device = "cuda" if present_card() else "cpu"
    one = recipe.trainer.n_gpus * recipe.trainer.nnodes == 1  # with more, no process has whole weights
    trains_there = device == "cuda" and recipe.trainer.device != "cpu" and one
    wanted = settings.transfer == "ipc" or (settings.transfer == "auto" and trains_there)
    ipc = trainer is not None and wanted
    if ipc and not trains_there:
        raise AgliteError(
            "engine.transfer: ipc moves weights within a GPU, and there is none for vLLM and trainer both",
            "use `transfer: auto`",
        )
    length = settings.context_length or 0
    if not length and device == "cpu":
        length = cpu_context(model_dir)
    folder = private_folder(run_dir.path)
    reaper.watch_memory(folder)
    shutil.rmtree(run_dir.transfer, ignore_errors=True)  # of one that was killed
    server = VllmServer(
        flags(
            settings,
            model_dir,
            device=device,
            trained=trainer is not None,
            ipc=ipc,
            context_length=length,
            seed=recipe.seed,
        ),
        folder,
        log_path=run_dir.logs / "vllm.log",
        env=environment(env, settings, model_dir, folder, device=device, ipc=ipc),
        start_timeout_s=settings.start_timeout_s,
        on_start=reaper.add,
        on_memory=reaper.watch_memory,
        on_stage=on_stage,
    )
    made = Collocated(
        OwnVllm(server, tokenizer),
        trainer,
        tokenizer,
        # on the CPU no memory is freed, and weights that were not dropped need not be brought back
        level=settings.sleep_level or (1 if recipe.trainer.lora or device == "cpu" else 2),
        must_sleep=device == "cuda",
        ipc=ipc,
        dtype=dtype(settings, device),
        memory=folder,
        disk=run_dir.transfer,
    )
    if trainer is not None:
        made.watch(trainer.exited)
    return made
