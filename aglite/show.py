"""A rollout in full, as the control API and `aglite show --json` give it."""

from __future__ import annotations

from typing import Any

from aglite.errors import AgliteError
from aglite.paths import RunDir
from aglite.store import Store

LOG_TAIL_BYTES = 16 * 1024


def rollout_detail(store: Store, run_dir: RunDir, rollout_id: str) -> dict[str, Any]:
    """The rollout's JSON with `task`, `calls` (messages, no tokens), `sample_rows`, `states` and `log_tail`.

    Raises AgliteError when there is no such rollout.
    """
    rollout = store.rollout(rollout_id)
    if rollout is None:
        raise AgliteError(f"no rollout {rollout_id}", "see `aglite rollouts`")
    calls = store.calls(rollout_id, rollout["attempt"] or None)
    log = run_dir.rollout_log(rollout_id, rollout["attempt"])
    return {
        **rollout,
        "task": store.task(rollout["split"], rollout["task_id"]),
        "states": store.rollout_states(rollout_id),
        "call_rows": [{**call_summary(call), "messages": store.messages(call)} for call in calls],
        "sample_rows": store.samples(rollout_id=rollout_id),
        "log_tail": _tail(log) if log.is_file() else "",
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
