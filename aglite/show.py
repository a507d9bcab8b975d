"""A rollout in full, as the control API and `aglite show --json` give it."""

from __future__ import annotations

from typing import Any

from aglite.paths import RunDir
from aglite.store import Store

LOG_TAIL_BYTES = 16 * 1024


def rollout_detail(store: Store, run_dir: RunDir, rollout_id: str, *, tokens: bool = False) -> dict[str, Any]:
    """The rollout's JSON with `task`, `states`, `log_tail`, `call_rows` (each with the `messages` of its prompt and its
    `reply`) and `sample_rows`; with `tokens` both also carry token ids, log-probabilities and versions.

    Raises StoreError when there is no such rollout.
    """
    rollout = store.rollout(rollout_id)
    tasks = store.tasks(rollout["split"])
    log = run_dir.rollout_log(rollout_id, rollout["attempt"])
    return {
        **rollout,
        "task": next((task for task in tasks if task["id"] == rollout["task_id"]), None),
        "states": store.rollout_states(rollout_id),
        "call_rows": [
            {
                **(call.json() if tokens else {}),
                **call_summary(call),
                "messages": store.messages(call),
                "reply": store.reply(call),
            }
            for call in store.calls(rollout_id)
        ],
        "sample_rows": [
            {**(sample.json() if tokens else {}), **sample_summary(sample)}
            for sample in store.samples(rollout_id=rollout_id)
        ],
        "log_tail": _tail(log) if log.is_file() else "",
    }


def sample_summary(sample: Any) -> dict[str, Any]:
    """A sample without its tokens."""
    return {
        "step": sample.step,
        "calls": [[call_id, int(trained)] for call_id, trained in sample.calls],
        "tokens": len(sample.input_ids),
        "trained_tokens": sum(sample.loss_mask),
        "advantage": sample.advantage,
        "weight": sample.weight,
    }


def call_summary(call: Any) -> dict[str, Any]:
    """A call without its tokens: the numbers a table shows."""
    return {
        "id": call.id,
        "parent_id": call.parent_id,
        "fork_cause": call.fork_cause,
        "dialect": call.dialect,
        "prompt_tokens": len(call.prompt_ids),
        "sampled_tokens": len(call.response_ids),
        "versions": call.versions,
        "finish_reason": call.finish_reason,
        "status": call.status,
        "error": call.error,
        "delivered": call.delivered,
        "held_s": call.held_s,
        "started_at": call.started_at,
        "first_token_at": call.first_token_at,
        "finished_at": call.finished_at,
    }


def _tail(path: Any) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace")
