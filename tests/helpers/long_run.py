"""A long run in a real store, and a real control API over it whose rollouts go on changing."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import yaml

from aglite.config import load_recipe
from aglite.paths import RunDir
from aglite.store import CallRecord, Store
from aglite.supervisor import Supervisor

RECIPE = {
    "name": "long",
    "model": "smollm2-135m",
    "tasks": {"train": "train.jsonl", "val": "train.jsonl"},
    "agent": {"command": ["python", "agent.py"]},
    "reward": {"grade": "grade.py:grade"},
    "trainer": {"steps": 200},
}
GROUP = 8
LIVE = 16
"""Rollouts at the end that are still running."""


async def record(folder: Path, rollouts: int, calls: int) -> RunDir:
    """A run in `folder` with `rollouts` rollouts of `calls` calls each, the last of them running."""
    run, draw = RunDir(folder), random.Random(1)
    run.create()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    store = Store.open(run.db)
    now = time.time()
    await store.set_meta("manifest", {"recipe": load_recipe(folder).dump(), "started_at": now - 9000})
    for number in range(rollouts):
        group, task = f"g-{number // GROUP:010x}", f"task-{number // GROUP % 97}"
        if number % GROUP == 0:
            await store.add_group(group, task, "train", GROUP)
        await store.add_rollout(f"r-{number:010x}", task, group, "train", "local")
        await store.set_rollout_state(f"r-{number:010x}", "starting", attempt=1)
        await asyncio.gather(*(store.add_call(_call(f"r-{number:010x}", at, now)) for at in range(calls)))
        if number < rollouts - LIVE:
            reward = draw.choice((0.0, 0.2, 0.8, 1.0))
            ended = {"reward": reward, "breakdown": {"word": reward}, "finished_at": now - rollouts + number}
            await store.set_rollout_state(f"r-{number:010x}", "done", **ended)
            await store.add_event("info", "rollout", f"r-{number:010x} is done with reward {reward}")
        else:
            await store.set_rollout_state(f"r-{number:010x}", "running")
    for step in range(1, rollouts // 32 + 1):
        mean = 0.2 + 0.7 * step / (rollouts // 32)
        metrics = {"reward_mean": mean, "reward_std": 0.3, "rollouts": 32, "trained_tokens": 9000, "entropy": 2 - mean,
                   "kl_rollout": 4e-4, "grad_norm": 0.5}  # fmt: skip
        await store.add_step(step, step, "applied", metrics, now - 900 + step, now - 890 + step)
        await store.add_event("info", "step", f"step {step}", {"step": step, "state": "applied", **metrics})
        for phase in ("draining", "training", "syncing", "rollout"):
            await store.set_phase(phase)
    store.close()
    return run


def _call(rollout_id: str, at: int, now: float) -> CallRecord:
    return CallRecord(
        rollout_id=rollout_id,
        attempt=1,
        new_prompt_ids=range(40 + at),
        prompt_len=40 + at,
        response_ids=range(20),
        logprobs=[-0.5] * 20,
        versions=[[at, 20]],
        dialect="chat",
        new_messages=[{"role": "user", "content": f"call {at}"}],
        reply_message={"role": "assistant", "content": "a reply"},
        finish_reason="stop",
        status="ok",
        delivered=True,
        fork_cause="first",
        started_at=now - 60 + at,
        first_token_at=now - 59.5 + at,
        finished_at=now - 59 + at,
    )


class _Standing(Supervisor):
    """Serves the control API over a store; its work is to change some rollouts again and again."""

    async def work(self) -> int:
        await self.phases.set("rollout")
        draw = random.Random(2)
        rows = [row["id"] for row in self.store.rollouts(limit=LIVE)]
        while True:
            await asyncio.sleep(0.25)
            await self.store.set_rollout_state(draw.choice(rows), draw.choice(("running", "grading", "starting")))
            await self.store.add_event("info", "rollout", "something happened")


def serve(folder: str) -> None:
    """Serve the run in `folder` until killed; it can be asked when its control.json is there."""
    run = RunDir(Path(folder))
    _Standing(load_recipe(run.path), run, lambda line: None).run()
