"""What a run has done so far, read from its store: the part of the status that outlives the supervisor."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from aglite.store import Store
from aglite.units import QUEUE

LOG_EVENTS = 50


def history(store: Store) -> dict[str, Any]:
    """The keys `queue`, `reward`, `val`, `entropy`, `kl`, `checkpoint` and `log` of the status; steps and evaluations
    that were rolled back are left out."""
    counts = store.counts_by_state()
    steps = live_steps(store)
    evaluations = [row for row in store.evaluations() if row["state"] == "done"]
    checkpoints = [row for row in store.checkpoints() if row["state"] == "kept"]
    latest = checkpoints[-1] if checkpoints else None
    return {
        "queue": {state: counts.get(state, 0) for state in QUEUE},
        "reward": [
            {"step": row["step"], "mean": row["metrics"]["reward_mean"], "std": row["metrics"]["reward_std"]}
            for row in steps
        ],
        "val": [
            {"step": row["step"], **{key: row["result"][key] for key in ("mean", "stderr", "n")}} for row in evaluations
        ],
        "entropy": _series(steps, "entropy"),
        "kl": _series(steps, "kl_rollout"),
        "checkpoint": {"step": latest["step"], "at": latest["created_at"]} if latest else None,
        "log": store.events(after=max(0, store.last_event_id() - LOG_EVENTS), limit=LOG_EVENTS),
    }


def database_bytes(db: Path) -> int:
    """Size of a run's database with its write-ahead log; 0 when it is gone."""
    size = 0
    for suffix in ("", "-wal"):
        with contextlib.suppress(FileNotFoundError):
            size += db.with_name(f"{db.name}{suffix}").stat().st_size
    return size


def live_steps(store: Store) -> list[dict[str, Any]]:
    """The steps that hold."""
    return [row for row in store.steps() if row["state"] != "rolled_back"]


def _series(steps: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    return [{"step": row["step"], "value": row["metrics"][key]} for row in steps if key in row["metrics"]]
