"""Calls for the tests of the store."""

from __future__ import annotations

from typing import Any

from aglite.store import CallRecord, Store


def a_call(rollout_id: str = "r-1", prompt: Any = (1, 2, 3), response: Any = (4, 5), **given: Any) -> CallRecord:
    """A plain delivered call; `prompt` are the new prompt ids."""
    fields = {
        "attempt": 1,
        "new_prompt_ids": list(prompt),
        "prompt_len": given.get("base_len", 0) + len(prompt),
        "response_ids": list(response),
        "logprobs": [-0.5] * len(response),
        "versions": [[0, len(response)]],
        "dialect": "chat",
        "status": "ok",
        "started_at": 1.0,
        "finished_at": 2.0,
        "delivered": True,
    }
    return CallRecord(rollout_id=rollout_id, **{**fields, **given})


async def a_rollout(store: Store, rollout_id: str = "r-1", group_id: str = "g-1", split: str = "train") -> None:
    """A running first attempt; its group is made when it is not there."""
    if group_id not in {group["id"] for group in store.groups()}:
        await store.add_group(group_id, "task", split, 4)
    await store.add_rollout(rollout_id, "task", group_id, split, "local")
    await store.set_rollout_state(rollout_id, "running", attempt=1)
