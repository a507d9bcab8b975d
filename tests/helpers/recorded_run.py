"""A small finished run in a real store: two steps, one group each, a conversation of two calls, one failure."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any
from unittest import mock

from aglite.paths import RunDir
from aglite.store import CallRecord, SampleRecord, Store

DONE, SECOND, FAILED, WAITING = "r-aa00000001", "r-aa00000002", "r-bb00000003", "r-cc00000004"
TASK = {"role": "user", "content": "Say a word with an a in it."}
REPLY = {"role": "assistant", "content": "boat"}
AGAIN = {"role": "user", "content": "Another one."}


def recorded_run(folder: Path, *, now: float | None = None, steps: int = 2) -> RunDir:
    """Make it in `folder` as of time `now`; the recipe wants `steps` steps, two are done."""
    run = RunDir(folder)
    run.create()
    store = Store.open(run.db)
    try:
        with mock.patch("time.time", lambda: now) if now is not None else mock.patch("time.time", time.time):
            asyncio.run(_fill(store, time.time() if now is None else now, steps))
    finally:
        store.close()
    run.rollout_log(DONE, 1).write_bytes(b"hello from the agent\n\xff raw byte\n")
    return run


async def _fill(store: Store, now: float, steps: int) -> None:
    recipe = {
        "name": "words",
        "model": "smollm2-135m",
        "algorithm": {"mode": "async"},
        "trainer": {"steps": steps},
    }
    await store.set_meta("manifest", {"recipe": recipe, "started_at": now - 300})
    await store.add_tasks("train", [{"id": f"t-{n}", "public": {"kind": "word"}, "hidden": {}} for n in (1, 2)])
    await store.set_phase("starting")
    for rollout_id, task, group in (
        (DONE, "t-1", "g-1"),
        (SECOND, "t-1", "g-1"),
        (FAILED, "t-2", "g-2"),
        (WAITING, "t-2", "g-2"),
    ):
        if group not in {row["id"] for row in store.groups()}:
            await store.add_group(group, task, "train", 2)
        await store.add_rollout(rollout_id, task, group, "train", "local")
    times = {"started_at": now - 60, "finished_at": now - 48}
    for rollout_id in (DONE, SECOND, FAILED):
        await store.set_rollout_state(rollout_id, "starting", attempt=1)
    first = await store.add_call(_call(DONE, now, [1, 2, 3], [4, 5], [TASK], REPLY))
    more = {
        "base_id": first,
        "base_len": 5,
        "parent_id": first,
        "matched_id": first,
        "base_messages": 1,
        "fork_cause": "",
    }
    second = await store.add_call(
        _call(DONE, now + 3, [6], [7], [REPLY, AGAIN], {"role": "assistant", "content": "a"}, **more)
    )
    alone = await store.add_call(_call(SECOND, now, [1, 2, 3], [9], [TASK], REPLY))
    await store.set_rollout_state(DONE, "done", reward=1.0, breakdown={"word": 1.0}, **times)
    await store.set_rollout_state(SECOND, "done", reward=0.0, breakdown={"word": 0.0}, **times)
    await store.set_rollout_state(FAILED, "failed", cause="wall time limit", reward=0.0, **times)
    for step, mean in ((1, 0.25), (2, 0.5)):
        metrics = {"reward_mean": mean, "reward_std": 0.5, "rollouts": 2, "trained_tokens": 4}
        samples = []
        if step == 1:
            samples = [
                SampleRecord(DONE, [(first, True), (second, True)], 7, 3, 0.7, 0.1),
                SampleRecord(SECOND, [(alone, True)], 4, 1, -0.7, 0.3),
            ]
        await store.add_step(step, step, "applied", metrics, now - 50, now - 40, samples=samples)
        await store.add_event("info", "step", f"step {step}", {"step": step, "state": "applied", **metrics})
        evaluation = await store.start_evaluation(step, step)
        await store.finish_evaluation(evaluation, "done", {"mean": mean + 0.1, "stderr": 0.05, "n": 16})
    await store.add_checkpoint(2, 2, "checkpoints/step-2")
    await store.set_phase("stopped")


def _call(
    rollout_id: str, at: float, prompt: list[int], response: list[int], messages: list[Any], reply: Any, **more: Any
) -> CallRecord:
    fields: dict[str, Any] = {"fork_cause": "first", **more}
    return CallRecord(
        rollout_id=rollout_id,
        attempt=1,
        new_prompt_ids=prompt,
        prompt_len=fields.get("base_len", 0) + len(prompt),
        response_ids=response,
        logprobs=[-0.5] * len(response),
        versions=[[0, len(response)]],
        dialect="chat",
        new_messages=messages,
        reply_message=reply,
        finish_reason="stop",
        status="ok",
        delivered=True,
        started_at=at - 58,
        first_token_at=at - 57.5,
        finished_at=at - 57,
        **fields,
    )
