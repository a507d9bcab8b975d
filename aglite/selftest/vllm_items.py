"""Items about a vLLM of aglite's own and the trainer that takes turns with it on one GPU."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aglite.config import Recipe
from aglite.engine.base import SamplingParams
from aglite.engine.collocated import Collocated, build
from aglite.engine.worker_client import WorkerClient
from aglite.gateway.renderers import load_renderer
from aglite.gpus import gpus
from aglite.paths import RunDir
from aglite.rollouts.reaper import Reaper
from aglite.runtime import worker_command
from aglite.selftest.bench import Bench, Figures, expect, recipe_with
from aglite.selftest.step import TEMPERATURE, batch_of

GIB = 2**30
SHARE = 0.5
"""Of the card that vLLM gets in these items."""
CONTEXT = 512
TOKENS = 200
"""Of a generation that an update interrupts."""
PROMPT = "Once upon a time there was a small engine. One day it"


def vllm_start(bench: Bench) -> Figures:
    """vLLM starts, passes the probe of ids and log-probabilities, samples, and leaves nothing behind."""

    async def tried(made: Collocated) -> Figures:
        started = time.monotonic()
        await _start(made, bench, trains=False)
        figures = {"start_s": round(time.monotonic() - started, 1), **_used("awake")}
        sampled = await _generate(made, bench, 32)
        expect(len(sampled) == 32, f"{len(sampled)} tokens were sampled, 32 were asked for")
        return figures

    return _with_pair(bench, "vllm-start", tried, trains=False)


def vllm_sleep(bench: Bench) -> Figures:
    """Asleep, vLLM leaves the GPU's memory to others; woken, it computes what it did before."""

    async def tried(made: Collocated) -> Figures:
        await _start(made, bench)
        row = bench.rows()[0]
        before, figures = await made.engine.logprobs(row), _used("awake")
        await made.preempt()
        await made.engine.sleep(1)
        figures |= _used("asleep")
        await made.engine.wake_weights()
        await made.engine.resume(0)
        after = await made.engine.logprobs(row)
        gap = max(abs(one - other) for one, other in zip(before, after, strict=True))
        expect(gap < 1e-3, f"after sleeping, log-probabilities differ by up to {gap:.2g}")
        if bench.device == "cuda":
            freed, share = figures["awake_gib"] - figures["asleep_gib"], SHARE * gpus({})[0]["mem_total"] / GIB
            expect(freed > 0.75 * share, f"sleeping freed {freed:.1f} GiB of {share:.1f}")
        return {**figures, "gap": gap}

    return _with_pair(bench, "vllm-sleep", tried)


def transfer_ipc(bench: Bench) -> Figures:
    """An update at sleep level 2: train, and new weights over CUDA IPC; vLLM is asked whether it has them."""
    return _transfer(bench, "ipc" if bench.device == "cuda" else "folder")


def transfer_folder(bench: Bench) -> Figures:
    """The same with the weights in a folder in memory."""
    return _transfer(bench, "folder")


def _transfer(bench: Bench, way: str) -> Figures:
    async def tried(made: Collocated) -> Figures:
        await _start(made, bench)
        figures: Figures = {}
        for version in (1, 2):
            figures |= await _update(made, bench, version)
        return figures

    return _with_pair(bench, f"transfer-{way}", tried, transfer=way, sleep_level=2)


def lora_vllm(bench: Bench) -> Figures:
    """An update of an adapter: vLLM sleeps at level 1 and gets the merged weights."""

    async def tried(made: Collocated) -> Figures:
        await _start(made, bench, lora={"rank": 8, "alpha": 16, "targets": []})
        return await _update(made, bench, 1)

    return _with_pair(bench, "lora-vllm", tried, lora=True)


def preempt(bench: Bench) -> Figures:
    """A generation under way stops at an update, keeps what it sampled, and goes on with the new weights (`keep`); one
    that nobody interrupts ends before the next update (`wait`)."""

    async def tried(made: Collocated) -> Figures:
        await _start(made, bench)
        counts: dict[int, int] = {}
        begun = asyncio.Event()

        def count(version: int, tokens: int) -> None:
            counts[version] = counts.get(version, 0) + tokens
            begun.set()

        task = asyncio.create_task(_generate(made, bench, TOKENS, count))
        await begun.wait()
        await _update(made, bench, 1)
        tokens = await task
        expect(len(tokens) == TOKENS, f"{len(tokens)} tokens came, {TOKENS} were asked for")
        expect(set(counts) == {0, 1}, f"tokens by version: {counts}; both versions were expected")
        drained = await _generate(made, bench, 16)
        expect(len(drained) == 16, f"a generation that ends before an update gave {len(drained)} of 16 tokens")
        await _update(made, bench, 2)
        return {"before_update": counts[0], "after_update": counts[1]}

    return _with_pair(bench, "preempt", tried)


def _with_pair(
    bench: Bench, name: str, body: Callable[[Collocated], Awaitable[Figures]], *, trains: bool = True, **options: Any
) -> Figures:
    async def run() -> Figures:
        async with _pair(bench, name, trains=trains, **options) as made:
            return await body(made)

    return asyncio.run(run())


@contextlib.asynccontextmanager
async def _pair(
    bench: Bench, name: str, *, trains: bool, lora: bool = False, **engine: Any
) -> AsyncIterator[Collocated]:
    """vLLM and trainer, not loaded yet; ended afterwards."""
    run_dir = RunDir(bench.folder(name))
    run_dir.create()
    reaper = Reaper(run_dir.path)
    await reaper.start()
    worker = None
    try:
        if trains:
            worker = WorkerClient(worker_command(), log_path=run_dir.logs / "worker.log", env=_environment(reaper))
            await worker.start()
            reaper.add(worker.pid)
        made = build(
            recipe_for(bench, lora=lora, **engine),
            run_dir,
            bench.model,
            load_renderer(bench.model).tokenizer,
            trainer=worker,
            reaper=reaper,
            env=_environment(reaper),
            on_stage=lambda stage: print(stage, flush=True),
        )
        try:
            yield made
        finally:
            await made.stop()
    finally:
        if worker is not None:
            await worker.stop()
        await reaper.stop()


def _environment(reaper: Reaper) -> dict[str, str]:
    return {**os.environ, **reaper.environment}


def recipe_for(bench: Bench, *, lora: bool = False, **engine: Any) -> Recipe:
    settings = {
        "kind": "vllm",
        "context_length": CONTEXT,
        "max_running": 8,
        "gpu_memory_utilization": SHARE,
        "enforce_eager": True,  # starts sooner; `up` tries CUDA graphs
        **engine,
    }
    trainer = {"lora": {"rank": 8, "alpha": 16}} if lora else {}
    return recipe_with(bench.model, trainer=trainer, engine=settings)


async def _start(made: Collocated, bench: Bench, *, trains: bool = True, lora: dict[str, Any] | None = None) -> None:
    settings = {"lr": 1e-3, "kl": 0.0, "device": bench.device, "lora": lora} if trains else {}
    await made.start(bench.model, settings, 0, None)


async def _update(made: Collocated, bench: Bench, version: int) -> Figures:
    """One update in the order of a run; `resume` itself asks vLLM whether it has the trainer's weights."""
    times, since = {}, time.monotonic()

    def lap(name: str) -> None:
        nonlocal since
        times[f"{name}_s"], since = round(time.monotonic() - since, 2), time.monotonic()

    await made.preempt()
    lap("pause")
    await made.sleep()
    lap("sleep_onload")
    rows = bench.rows()
    recorded = await made.logprobs(rows, TEMPERATURE, "trainer")
    result = await made.train(batch_of(bench.model, rows, [list(values) for values in recorded]))
    expect(bool(result["applied"]), "the update was not applied: loss or gradient is not finite")
    lap("train")
    await made.resume(version)
    lap("sync")
    return times


async def _generate(
    made: Collocated, bench: Bench, count: int, on_tokens: Callable[[int, int], None] = lambda version, tokens: None
) -> list[int]:
    """Tokens of one generation that nothing but their number ends; `on_tokens` is told the version and number of those
    that have come."""
    prompt = load_renderer(bench.model).tokenizer.encode(PROMPT)
    found: list[int] = []
    async for chunk in made.generate(prompt, SamplingParams(count, seed=1)):
        found += chunk.token_ids
        if chunk.token_ids:
            on_tokens(chunk.version, len(chunk.token_ids))
    return found


def _used(name: str) -> Figures:
    """GiB of the first GPU in use; nothing without one."""
    found = gpus({})
    return {f"{name}_gib": round(found[0]["mem_used"] / GIB, 2)} if found else {}
